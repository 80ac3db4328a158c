"""One injected fault, one finding: on real ranks, with the right code, line and culprit.

These are the quick ones of ``tests.faults``; ``python -m tests.benchmarks.faults`` runs all, several times.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.faults.cases import FAULTS
from tests.faults.healthy import HEALTHY, QUICK, examine_healthy
from tests.faults.judge import run_fault


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.quick])
def test_a_fault_is_found_once_and_named_rightly(name: str, tmp_path: Path) -> None:
    run = run_fault(FAULTS[name], tmp_path)
    assert run.wrong == ""
    assert run.examination.exit_code == 1
    assert not psutil.Process().children(recursive=True)


@pytest.mark.parametrize("name", QUICK)
def test_correct_code_is_left_alone(name: str, tmp_path: Path) -> None:
    assert examine_healthy(HEALTHY[name], tmp_path) == ""
