"""A few rows of the table of ``python -m tests.damaged``, and 2,000 with ``-m full``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.check_command import ROOT
from tests.damaged.__main__ import rows
from tests.damaged.cases import case
from tests.damaged.judge import problems, tree
from tests.damaged.originals import make
from tests.damaged.server import Ending, environment_of

SEED = 1
OFTEN = 60
MANY = 2_000


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("originals")
    make(directory)
    return directory


@pytest.mark.timeout(300)
def test_a_sample_of_damaged_files_is_answered_well(originals: Path, tmp_path: Path) -> None:
    found = list(rows(range(OFTEN), SEED, originals, tmp_path))
    assert [(row.case.name, row.case.arguments, row.problems) for row in found if row.problems] == []
    assert len(found) == OFTEN


def test_a_wrong_answer_is_told(tmp_path: Path) -> None:
    (tmp_path / "originals").mkdir()
    (tmp_path / "originals" / "baseline.json").write_text("{}")
    of_a_baseline = case(0, SEED, tmp_path / "originals", tmp_path)
    made = msgspec.structs.replace(of_a_baseline, may_read=False)
    before = tree(tmp_path)
    (tmp_path / "stdout").write_bytes(b"\x1b[2J\n ::error::x\n")
    (tmp_path / "stderr").write_bytes(b"error: " + b"k" * 2_000)
    (tmp_path / "outside" / "secret").read_bytes()
    (tmp_path / "work" / "new").touch()
    ending = Ending(code=2, seconds=30.0, processor_s=30.0, peak_bytes=1 << 31)
    told = "; ".join(problems(made, ending, tmp_path, before, 1.0))
    for problem in ("took 30.0 s", "took 2048 MiB", "an error of", "holds the command", "changed", "read outside"):
        assert problem in told


@pytest.mark.full
@pytest.mark.timeout(3_600)
def test_2000_damaged_files_are_answered_well(originals: Path, tmp_path: Path) -> None:
    found = rows(range(MANY), SEED, originals, tmp_path)
    assert [(row.number, row.case.name, row.problems) for row in found if row.problems] == []


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_real_command_answers_as_its_forks_do(originals: Path, tmp_path: Path) -> None:
    for row in rows(range(40), SEED + 1, originals, tmp_path / "forked"):
        place = tmp_path / f"real-{row.number}"
        made = case(row.number, SEED + 1, originals, place)
        if made.grows or "without permission" in made.name:
            continue
        environment = {**os.environ, **environment_of(place / "work"), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", "ddpdoctor", *made.arguments],
            cwd=place / "work", env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == row.ending.code, made
