"""Processes in a PID namespace of their own, as in a container, are found by the numbers that they have in there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpdoctor.launch.kept_runs import QUIET_FOR_S, live_processes, prune
from ddpdoctor.launch.pid_namespaces import OuterPids, number_inside, thread_outside
from ddpdoctor.record import layout

_SLEEPS = "import os; print(os.getpid(), flush=True); os.read(0, 1)"
_INSIDE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def _may() -> bool:
    try:
        return subprocess.run([*_INSIDE, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.fixture
def contained(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A run directory, and the own number of its only process, which lives in a namespace of its own."""
    if not _may():
        pytest.skip("a PID namespace takes root and unshare")
    run = tmp_path / "run"
    run.mkdir()
    process = subprocess.Popen(
        [*_INSIDE, sys.executable, "-c", _SLEEPS],
        env={**os.environ, layout.RUN_VARIABLE: str(run)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        inner = int(process.stdout.readline())
        (run / layout.EVENTS_FILE.format(inner)).touch()
        yield run, inner
    finally:
        process.kill()
        process.communicate()


def test_the_number_out_here_is_found_and_a_foreign_process_with_the_number_is_none(
    contained: tuple[Path, int],
) -> None:
    run, inner = contained
    pids = OuterPids(run)
    outer = pids(inner)
    # Out here it is another process that has the number, if any.
    assert outer is not None and outer != inner and number_inside(outer) == inner
    assert pids.is_alive(inner) and not pids.is_stopped(inner)
    assert thread_outside(outer, inner) == outer
    assert pids.of_ranks({3: inner}) == {3: outer}
    os.kill(outer, 9)
    deadline = time.monotonic() + 30
    while pids.is_alive(inner):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_in_a_container_is_live(
    contained: tuple[Path, int],
) -> None:
    run, inner = contained
    assert live_processes(run) == (inner,)


def test_a_run_that_was_written_to_lately_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("ddpdoctor.launch.kept_runs.MOST_RUNS", 1)
    runs = tmp_path / "ddpdoctor" / "runs"
    new, old = runs / "run-2", runs / "run-1"
    long_ago = time.time() - QUIET_FOR_S - 60
    for run in (new, old):
        run.mkdir(parents=True)
        (run / layout.JOB_FILE).touch()
    os.utime(old / layout.JOB_FILE, (long_ago, long_ago))
    prune(runs)
    assert (new.exists(), old.exists()) == (True, False)


def test_a_process_out_here_that_writes_files_of_the_run_keeps_its_number(tmp_path: Path) -> None:
    with open(tmp_path / layout.STEPS_FILE.format(os.getpid()), "wb"):
        assert OuterPids(tmp_path)(os.getpid()) == os.getpid()


def test_an_unrelated_process_with_the_number_is_none_of_the_run(tmp_path: Path) -> None:
    """A signal for stacks would end it."""
    name = tmp_path / layout.STEPS_FILE.format(os.getpid())
    name.touch()
    with open(name, "rb"):  # As a monitor does.
        assert OuterPids(tmp_path)(os.getpid()) is None
    assert live_processes(tmp_path) == ()
