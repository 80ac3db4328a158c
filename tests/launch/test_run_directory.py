"""Run directories come and go, also when a doctor was killed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ddpdoctor.launch.kept_runs import (
    QUIET_FOR_S,
    keep_for_cleaning,
    prune,
    rehearsal_directories,
    state_directory,
    temporary_run_directory,
)
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


def test_a_run_directory_that_is_kept_for_cleaning_stays() -> None:
    with temporary_run_directory() as directory:
        keep_for_cleaning(directory)
    assert rehearsal_directories() == [directory]


def test_a_state_directory_that_cannot_be_made_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with temporary_run_directory() as directory:
        assert directory.is_dir()
    assert not directory.exists()


def test_of_an_old_run_what_the_user_put_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpdoctor.launch.kept_runs.MOST_RUNS", 2)
    runs, mine = state_directory() / "runs", tmp_path / "mine"
    long_ago = time.time() - QUIET_FOR_S - 60
    mine.mkdir()
    for run in (runs / "run-3", runs / "run-2", runs / "run-1", mine):
        run.mkdir(parents=True, exist_ok=True)
        for name in (layout.JOB_FILE, "events-4999999.jsonl", "steps-4999999.ring", "history.sqlite"):
            (run / name).touch()
            os.utime(run / name, (long_ago, long_ago))
    (runs / "run-1" / "trace.json.gz").touch()
    os.utime(runs / "run-1" / "trace.json.gz", (long_ago, long_ago))
    (runs / "run-0").symlink_to(mine)
    prune(runs)
    assert not (runs / "run-2").exists()
    assert [path.name for path in (runs / "run-1").iterdir()] == ["trace.json.gz"]
    assert len(list(mine.iterdir())) == len(list((runs / "run-3").iterdir())) == 4
