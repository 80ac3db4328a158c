"""A handful of the idioms and of their broken variants; ``python -m tests.idioms`` rehearses all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.idioms.cases import IDIOMS, SCRIPTS
from tests.idioms.defects import DEFECTS, Defect
from tests.script_table.rehearsal import complaints, rehearse

BY_NAME = {idiom.name: idiom for idiom in IDIOMS}
HEALTHY = ("config_by_exec", "nested_project", "object_detection", "time_limited", "token_stream")
BROKEN = ("every rank saves", "no sampler")


def test_every_script_is_rehearsed_by_the_table_and_has_a_usual_size() -> None:
    assert sorted(BY_NAME) == sorted(path.stem for path in SCRIPTS.iterdir() if path.name != "__pycache__")
    for idiom in IDIOMS:
        path = SCRIPTS / idiom.name
        files = [*path.rglob("*.py")] if path.is_dir() else [path.with_suffix(".py")]
        assert 50 <= sum(len(file.read_text().splitlines()) for file in files) <= 350, idiom.name


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_is_one_edit_of_a_script_that_still_compiles(defect: Defect, tmp_path: Path) -> None:
    BY_NAME[defect.idiom].lay_out(tmp_path)
    defect.apply(tmp_path)
    compile((tmp_path / defect.file).read_text(), defect.file, "exec")


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_idiom_is_rehearsed_to_its_end_in_silence_and_leaves_no_trace(name: str, tmp_path: Path) -> None:
    _is_as_it_has_to_be(name, None, tmp_path)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_idiom_gives_the_finding_of_its_defect(name: str, tmp_path: Path) -> None:
    defect = next(defect for defect in DEFECTS if defect.name == name)
    _is_as_it_has_to_be(defect.idiom, defect, tmp_path)


def _is_as_it_has_to_be(name: str, defect: Defect | None, folder: Path) -> None:
    idiom = BY_NAME[name]
    project = folder / "project"
    project.mkdir()
    outcome = rehearse(idiom, project, folder / "state", defect)
    assert complaints(idiom, outcome, defect) == [], outcome.report["rehearsal"]
