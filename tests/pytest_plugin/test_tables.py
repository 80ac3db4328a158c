from __future__ import annotations

from pathlib import Path

import pytest

from tests.pytest_plugin.tables import run_faults, run_healthy


@pytest.mark.full
@pytest.mark.timeout(3_000)
def test_every_fault_is_red_for_its_own_reason_and_leaves_nothing(tmp_path: Path) -> None:
    judged, left = run_faults(tmp_path)
    assert len(judged) >= 25
    assert {case.name: (case.wrong, case.first_line) for case in judged if case.wrong} == {}
    assert left == []


@pytest.mark.full
@pytest.mark.timeout(3_000)
def test_healthy_bodies_are_green_every_time(tmp_path: Path) -> None:
    session, left = run_healthy(tmp_path)
    assert {name: session.messages[name] for name, end in session.outcomes.items() if end != "passed"} == {}
    assert len(session.outcomes) == 200
    assert left == []
