"""Run directories come and go, also when a doctor was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.launch.runs.run_directory import (
    keep_for_cleaning,
    rehearsal_directories,
    state_directory,
    temporary_run_directory,
)


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
