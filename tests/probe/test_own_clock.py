"""What will wake a thread that does nothing is known from the system call that it is in."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from ddpdoctor.probe.live.clocks import Clock, clock_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells it on Linux only")
READY = "import sys; print(flush=True); "


def _clock_of_child(code: str, wanted: Callable[[Clock | None], bool]) -> Clock | None:
    """The clock of a Python process once it is as wanted, or what it is after a while."""
    with subprocess.Popen([sys.executable, "-c", READY + code], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            deadline = time.monotonic() + 30
            while not wanted(clock := clock_of(child.pid, child.pid)) and time.monotonic() < deadline:
                time.sleep(0.05)
            return clock
        finally:
            child.kill()


def _three_times_none() -> Callable[[Clock | None], bool]:
    seen: list[Clock | None] = []

    def three_times_none(clock: Clock | None) -> bool:
        seen.append(clock)
        return seen[-3:] == [None] * 3 and len(seen) > 10

    return three_times_none


def _left_s(clock: Clock) -> float:
    return (clock.ends_at_ns - time.time_ns()) / 1e9


def test_a_sleep_has_a_known_end() -> None:
    clock = _clock_of_child("import time; time.sleep(500)", lambda clock: clock is not None and _left_s(clock) > 400)
    assert clock is not None and clock.sleeps
    assert 400 < _left_s(clock) <= 500


@pytest.mark.parametrize(
    "code",
    [
        "import queue; queue.Queue().get(timeout=500)",
        "import threading; threading.Event().wait(500)",
        "import socket; a, b = socket.socketpair(); a.settimeout(500); a.recv(1)",
    ],
)
def test_a_wait_with_a_limit_is_no_sleep_but_ends(code: str) -> None:
    clock = _clock_of_child(code, lambda clock: clock is not None and _left_s(clock) > 400)
    assert clock is not None and not clock.sleeps
    assert 400 < _left_s(clock) <= 501


@pytest.mark.parametrize("code", ["import threading; threading.Event().wait()", "sys.stdin.read()"])
def test_what_waits_without_a_limit_has_no_clock(code: str) -> None:
    assert _clock_of_child(code, _three_times_none()) is None


def test_a_time_that_is_none_is_no_clock() -> None:
    """A thread that goes on while it is asked leaves something else in its place; no heartbeat could hold this one."""
    code = (
        "import ctypes; ctypes.CDLL(None).nanosleep((ctypes.c_int64 * 2)(1 << 62, 0), None)",
        "import ctypes, time; ctypes.CDLL(None).nanosleep((ctypes.c_int64 * 2)(1 << 30, 0), None)",
    )
    assert _clock_of_child(code[0], _three_times_none()) is None
    clock = _clock_of_child(code[1], lambda clock: clock is not None)
    assert clock is not None and clock.sleeps


def test_a_process_that_is_gone_has_none() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert clock_of(child.pid, child.pid) is None
