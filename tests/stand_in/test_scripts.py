"""A handful of the CUDA scripts and of their broken variants; ``python -m tests.stand_in`` rehearses all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.script_table.rehearsal import complaints, rehearse
from tests.stand_in.table import BROKEN, CUDA_SCRIPTS, SCRIPTS, Broken

BY_NAME = {script.name: script for script in CUDA_SCRIPTS}


def test_every_script_demands_cuda_and_nccl_is_in_the_table_and_has_a_usual_size() -> None:
    assert sorted(BY_NAME) == sorted(path.stem for path in SCRIPTS.glob("*.py"))
    for path in SCRIPTS.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        compile(text, str(path), "exec")
        assert "nccl" in text.lower() and "cuda" in text
        assert 60 <= len(text.splitlines()) <= 200, path.name


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_a_broken_variant_is_one_edit_of_a_script_that_still_compiles(broken: Broken, tmp_path: Path) -> None:
    BY_NAME[broken.script].lay_out(tmp_path)
    broken.apply(tmp_path)
    compile((tmp_path / broken.file).read_text(encoding="utf-8"), broken.file, "exec")


@pytest.mark.parametrize("name", ["detection_engine", "proximal_policy"])
def test_a_healthy_script_is_rehearsed_to_its_end_in_silence(name: str, tmp_path: Path) -> None:
    _is_as_it_has_to_be(name, None, tmp_path)


@pytest.mark.parametrize("name", ["the global rank as the GPU's index", "no set_device"])
def test_a_broken_script_gives_the_finding_of_its_defect(name: str, tmp_path: Path) -> None:
    broken = next(broken for broken in BROKEN if broken.name == name)
    _is_as_it_has_to_be(broken.script, broken, tmp_path)


def _is_as_it_has_to_be(name: str, broken: Broken | None, folder: Path) -> None:
    project = folder / "project"
    project.mkdir()
    outcome = rehearse(BY_NAME[name], project, folder / "state", broken)
    assert complaints(BY_NAME[name], outcome, broken) == [], outcome.report["rehearsal"]
