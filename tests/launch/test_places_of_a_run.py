"""Where the record of a run and the output of its job go when a place for them is missing or full."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from ddpdoctor.errors import ConfigurationError
from ddpdoctor.launch.kept_output import KeptOutput
from ddpdoctor.launch.kept_runs import new_run_directory
from ddpdoctor.record import layout

PLAN = {"version": 1, "kind": "run"}


def test_a_run_is_kept_in_the_temporary_directory_where_the_state_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").write_text("a file")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    directory = new_run_directory(None, PLAN)
    assert directory.parent == tmp_path
    assert directory.stat().st_mode & 0o777 == 0o700
    assert json.loads((directory / layout.JOB_FILE).read_text())["kind"] == "run"
    monkeypatch.setenv("TMPDIR", str(tmp_path / "state"))
    with pytest.raises(ConfigurationError, match="no directory for the run could be created"):
        new_run_directory(None, PLAN)


def test_a_plan_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(Path, "replace", _full)
    with pytest.raises(ConfigurationError, match="No space left"):
        new_run_directory(None, PLAN)
    assert [path for path in tmp_path.rglob("*") if path.is_file() or "run-" in path.name] == []


def _full(*arguments: object) -> None:
    raise OSError(28, "No space left on device")


def test_what_a_job_prints_is_kept_to_the_last_byte(tmp_path: Path) -> None:
    (tmp_path / "output").touch()
    kept = KeptOutput(tmp_path / "output")
    os.write(kept.pipe, b"printed\n" * 5_000)
    kept.close()
    until_s = time.monotonic() + 60
    while (tmp_path / "output").read_bytes() != b"printed\n" * 5_000:
        assert time.monotonic() < until_s
        time.sleep(0.02)
    assert kept.is_whole()


def test_a_full_disk_is_not_met_by_who_prints() -> None:
    kept = KeptOutput(Path("/dev/full"))
    for _ in range(100):
        assert os.write(kept.pipe, bytes(10_000)) == 10_000
    kept.close()
    until_s = time.monotonic() + 60
    while kept.is_whole():
        assert time.monotonic() < until_s
