"""Ending the processes of a job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.launch import processes


def test_a_process_that_does_not_end_when_it_is_killed_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processes, "_kill", lambda pid: None)
    monkeypatch.setattr(processes, "_END_AT_MOST_S", 0.1)
    job = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        with processes.started(lambda: job, tmp_path) as owned:
            pass
        assert owned.left == (job.pid,)
    finally:
        job.kill()
        job.communicate()


def test_nothing_is_left_of_a_job_that_was_ended(tmp_path: Path) -> None:
    with processes.started(lambda: subprocess.Popen(["sleep", "600"]), tmp_path) as owned:
        pass
    assert owned.left == ()
