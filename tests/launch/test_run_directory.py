"""Run directories come and go, also when a doctor was killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.launch.run_directory import state_directory, temporary_run_directory
from ddpdoctor.record import layout


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_a_run_directory_is_private_and_gone_afterwards() -> None:
    with temporary_run_directory() as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        assert directory.is_relative_to(state_directory())
        (directory / "events-1.jsonl").write_text("{}")
    assert not directory.exists()


def test_what_a_killed_doctor_left_is_swept_and_what_a_living_one_uses_is_not() -> None:
    runs = state_directory() / "runs"
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    for name, pid in (("rehearsal-dead", dead.pid), ("rehearsal-alive", os.getpid())):
        (runs / name).mkdir(parents=True)
        (runs / name / layout.JOB_FILE).write_text(json.dumps({"supervisor_pid": pid}))
    (runs / "rehearsal-without-a-plan").mkdir()
    with temporary_run_directory():
        pass
    assert sorted(path.name for path in runs.iterdir()) == ["rehearsal-alive", "rehearsal-without-a-plan"]


def test_a_state_directory_that_cannot_be_made_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with temporary_run_directory() as directory:
        assert directory.is_dir()
    assert not directory.exists()
