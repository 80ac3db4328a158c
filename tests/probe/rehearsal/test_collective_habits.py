"""Collectives that work and should not be there, all in one script, and their correct twins in another."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.examine.one_script import ExamineRequest, examine
from tests.faults.script import training_script

CODES = ("DDP303", "DDP307", "DDP309", "DDP313", "DDP316")
TIMEOUT = """
from datetime import timedelta
impatient = dist.new_group([0, 1], timeout=timedelta(seconds=SECONDS))
alone = dist.new_group([0])
dist.barrier(group=impatient)
if rank == 1:
    end = time.monotonic() + 2.5
    while time.monotonic() < end: sum(range(1000))
dist.barrier(group=impatient)  # DDP307
"""
BROKEN = {
    "after_wrap": TIMEOUT.replace("SECONDS", "4"),
    "within": "with torch.no_grad():\n    if rank == 0 and step == 3: model(x)  # DDP303",
    "between": "dist.all_reduce(loss)  # DDP316",
    "end_of_step": "dist.all_reduce(value, group=alone)  # DDP309\ndist.barrier()  # DDP313",
}
CORRECT = {
    "after_wrap": TIMEOUT.replace("SECONDS", "60").replace("  # DDP307", ""),
    "within": "with torch.no_grad():\n    if step == 3: model(x)\n    if rank == 0: model.module(x)",
    "between": "dist.all_reduce(loss.detach().clone())",
    "end_of_step": "if rank == 0: dist.all_reduce(value, group=alone)\nif step == 3: dist.barrier()",
}


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def found_in_the_run(lines: dict[str, str]) -> tuple[set[str], set[tuple[str, int]]]:
    script = training_script("nn.BatchNorm1d(8)", **lines)
    Path("train.py").write_text(script)
    examination = examine(ExamineRequest(target="train.py", select=CODES))
    assert examination.rehearsal.status == "completed", examination.rehearsal
    marked = {
        (code, number)
        for number, line in enumerate(script.splitlines(), 1)
        for code in CODES
        if line.endswith(f"# {code}")
    }
    seen = {finding.code for finding in examination.findings if "rehearsal" in finding.basis}
    places = {(finding.code, place.line) for finding in examination.findings for place in finding.locations}
    assert marked <= places, marked - places
    return seen, marked


def test_each_habit_is_found_at_its_line() -> None:
    seen, marked = found_in_the_run(BROKEN)
    assert seen == set(CODES) == {code for code, _ in marked}


def test_their_correct_twins_are_left_alone() -> None:
    assert found_in_the_run(CORRECT)[0] == set()
