"""The signal by which stacks are asked for is never sent where the script has taken the handler away."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddpdoctor.launch.processes import handles
from ddpdoctor.monitor.processes.stacks import SignalledStacks, signal_for_stacks
from ddpdoctor.record import layout

_SCRIPT = """
import faulthandler, signal, sys, time
from ddpdoctor.probe.heartbeat import register_for_stacks
before = signal.getsignal(signal.SIGUSR2)
register_for_stacks(sys.argv[1])
{then}
for _ in range(2):
    print("here", flush=True)
    sys.stdin.readline()
"""
_TAKEN = {
    "restored as it was": "signal.signal(signal.SIGUSR2, before)",
    "a handler of its own": "signal.signal(signal.SIGUSR2, lambda *_: sys.exit(7))",
    "unregistered": "faulthandler.unregister(signal.SIGUSR2)",
    "registered anew": "faulthandler.register(signal.SIGUSR2)",
}


@pytest.mark.parametrize("then", _TAKEN.values(), ids=_TAKEN.keys())
def test_the_licence_goes_before_the_handler(tmp_path: Path, then: str) -> None:
    with _started(tmp_path, then) as process:
        assert not (tmp_path / layout.STACKS_FILE.format(process.pid)).exists()
        _ask(tmp_path, process.pid)
        _assert_it_lives(process)


def test_stacks_are_written_where_the_script_lets_the_signal_alone(tmp_path: Path) -> None:
    with _started(tmp_path, "signal.signal(signal.SIGUSR1, print)") as process:
        assert handles(process.pid, signal.SIGUSR2)
        dumps = signal_for_stacks(tmp_path, {process.pid: 0})
        assert any(frame.function == "<module>" for dump in dumps for frame in dump.frames)


def test_a_handler_that_went_behind_our_back_is_seen(tmp_path: Path) -> None:
    with _started(tmp_path, "import _signal; _signal.signal(signal.SIGUSR2, _signal.SIG_DFL)") as process:
        assert (tmp_path / layout.STACKS_FILE.format(process.pid)).exists()
        _ask(tmp_path, process.pid)
        _assert_it_lives(process)


def _assert_it_lives(process: subprocess.Popen[str]) -> None:
    """A signal that was sent before is dealt with before it answers."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "here\n"


def _ask(folder: Path, pid: int) -> None:
    signal_for_stacks(folder, {pid: 0})
    SignalledStacks(folder).ask(pid, pid, time.time_ns())


@contextmanager
def _started(folder: Path, then: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _SCRIPT.format(then=then), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "here\n"
            yield process
        finally:
            process.kill()
