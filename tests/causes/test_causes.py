"""The cause leads, with a remedy that works: cases that were told by their symptoms, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.causes.cases import CASES, Case, lay_out
from tests.causes.judge import complaints, report_of, worse_than_static
from tests.check_command import check


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The scripts in a directory of their own."""
    return lay_out(tmp_path / "project")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_source_says_the_cause_where_it_shows_it(case: Case, project: Path) -> None:
    assert complaints(case.source, report_of(case, project, "--static")) == []


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.quick or number % 10 == 0 else pytest.mark.full)
        for number, case in enumerate(CASES)
    ],
)
def test_the_whole_check_says_the_cause_and_no_less_than_the_source(case: Case, project: Path, tmp_path: Path) -> None:
    checked = report_of(case, project, XDG_STATE_HOME=str(tmp_path))
    assert complaints(case.checked, checked) == []
    assert worse_than_static(report_of(case, project, "--static"), checked) == []


_HEALTHY = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(2, 1))
    for step in range(3):
        model(torch.randn(4, 2)).sum().backward()
    dist.destroy_process_group()
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.checked and not case.script.startswith("-m")], ids=lambda case: case.name
)
def test_the_gate_says_the_cause_where_a_healthy_script_was_accepted(case: Case, project: Path, tmp_path: Path) -> None:
    broken = (project / case.script).read_text(encoding="utf-8")
    (project / case.script).write_text(_HEALTHY, encoding="utf-8")
    target, kept = [case.script, "--", *case.arguments], {"XDG_STATE_HOME": str(tmp_path)}
    check("--update", *target, cwd=project, command="gate", **kept)
    (project / case.script).write_text(broken, encoding="utf-8")
    gated = check(*target, cwd=project, command="gate", **kept)[1]
    assert worse_than_static(report_of(case, project, "--static"), gated) == []


def _report(*findings: dict[str, Any], refuted: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {"findings": list(findings), "refuted": list(refuted)}


def _finding(code: str, line: int, remedy: str = "move it") -> dict[str, Any]:
    place = {"file": "train.py", "line": line}
    said = {"code": code, "severity": "error", "title": code, "remedy": remedy, "ranks": []}
    return {**said, "locations": [place], "evidence": []}


def test_another_place_another_remedy_and_silence_are_worse() -> None:
    static = _report(_finding("DDP301", 9))
    assert worse_than_static(static, static) == []
    for checked in (_report(), _report(_finding("DDP301", 12)), _report(_finding("DDP306", 9, "leave together"))):
        assert worse_than_static(static, checked) == ["DDP301 at line 9 is not told: DDP301"]
    assert worse_than_static(static, _report(_finding("DDP706", 9, "fix it"))) == []
    place = {"code": "DDP301", "location": {"file": "train.py", "line": 9}}
    assert worse_than_static(static, _report(refuted=(place,))) == []
