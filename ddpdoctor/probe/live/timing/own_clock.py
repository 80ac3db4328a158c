"""Whether a thread that does nothing will be woken by a clock which it set itself: a sleep, a timed wait.

The kernel shows what system call a thread is in, with its arguments: of the threads of one's own process, and of
processes below one's own. Elsewhere than on Linux, and on other processors, nothing is known of clocks.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
from types import FrameType
from typing import NamedTuple, Optional

from ....record.clock import epoch_ns, from_system, offset_ns

_TIME = struct.Struct("<qq")
_ABSOLUTE, _REALTIME = 1, 0
_FUTEX_WAIT, _FUTEX_WAIT_BITSET, _FUTEX_COMMAND, _FUTEX_REALTIME = 0, 9, 0x7F, 0x100
_MOST_S = 1 << 33
"""Whatever counts from the epoch is below for 200 years, and fits into a heartbeat."""
LONGEST_WAIT_NS = 60_000_000_000
"""A wait for something with a later end than this is none for its end."""
_CALLS = {
    "x86_64": {35: "nanosleep", 230: "clock_nanosleep", 202: "futex", 7: "poll", 271: "ppoll", 23: "select",
               270: "pselect", 232: "epoll", 281: "epoll", 128: "sigtimedwait"},
    "aarch64": {101: "nanosleep", 115: "clock_nanosleep", 98: "futex", 73: "ppoll", 72: "pselect", 22: "epoll",
                137: "sigtimedwait"},
}  # fmt: skip
_MACHINE = _CALLS.get(os.uname().machine, {}) if sys.platform == "linux" else {}
_POINTER = {"ppoll": 2, "select": 4, "pselect": 4, "sigtimedwait": 2}
"""Which argument points to the time after which a call returns."""
_MILLISECONDS = {"poll": 2, "epoll": 3}
_LOADER = os.path.join("torch", "utils", "data", "")
_TORCH = os.sep + "torch" + os.sep


read_bytes = 0
"""By this module in this process: what the probe reads is no sign of life of its rank."""


class Clock(NamedTuple):
    """What will wake a thread."""

    ends_at_ns: int
    """On the clock of the epoch; where only the length of the wait is known, as if it began now."""
    sleeps: bool
    """It waits for nothing else."""


def clock_of(pid: int, thread: int) -> Optional[Clock]:
    """Return the clock that will wake a thread of a process; None without one, where it runs, or may not be read."""
    if not _MACHINE:
        return None
    path = f"/proc/{pid}/task/{thread}/syscall"
    try:
        text = _read(path)
        words = text.split()
        name = _MACHINE.get(int(words[0])) if len(words) >= 7 else None
        clock = _clock(pid, name, [int(word, 16) for word in words[1:7]]) if name is not None else None
        # A thread that went on meanwhile has put something else where its time was: seen as a year beyond 64 bits.
        return clock if clock is not None and _read(path) == text else None
    except (OSError, ValueError, struct.error):
        return None


def _read(path: str) -> bytes:
    global read_bytes
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(file, 256)
    finally:
        os.close(file)
    read_bytes += len(text)
    return text


def _clock(pid: int, name: str, arguments: list[int]) -> Optional[Clock]:
    now_ns = epoch_ns()
    if name in _MILLISECONDS:
        wait_ms = arguments[_MILLISECONDS[name]] & 0xFFFFFFFF
        return None if wait_ms >> 31 or not wait_ms else Clock(now_ns + wait_ms * 1_000_000, False)
    if name == "nanosleep":
        return _ends(pid, arguments[0], now_ns, sleeps=True)
    if name == "clock_nanosleep":
        return _ends(pid, arguments[2], _origin_ns(arguments[1] & _ABSOLUTE, arguments[0] == _REALTIME), sleeps=True)
    if name == "futex":
        command = arguments[1] & _FUTEX_COMMAND
        if command not in (_FUTEX_WAIT, _FUTEX_WAIT_BITSET) or not arguments[3]:
            return None
        realtime = bool(arguments[1] & _FUTEX_REALTIME)
        return _ends(pid, arguments[3], _origin_ns(command == _FUTEX_WAIT_BITSET, realtime), sleeps=False)
    address = arguments[_POINTER[name]]
    waits_for_nothing = name in ("select", "pselect") and not arguments[0]
    in_us = 1_000 if name == "select" else 1
    return _ends(pid, address, now_ns, sleeps=waits_for_nothing, unit_ns=in_us) if address else None


def _origin_ns(absolute: bool | int, realtime: bool) -> int:
    """Return the moment of the epoch from which a time counts."""
    if not absolute:
        return epoch_ns()
    return from_system(0) if realtime else offset_ns()


def _ends(pid: int, address: int, origin_ns: int, *, sleeps: bool, unit_ns: int = 1) -> Clock:
    global read_bytes
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        seconds, parts = _TIME.unpack(os.pread(memory, _TIME.size, address))
    finally:
        os.close(memory)
    read_bytes += _TIME.size
    if not (0 <= seconds <= _MOST_S and 0 <= parts * unit_ns < 1_000_000_000):
        raise ValueError("this is no time")
    return Clock(origin_ns + seconds * 1_000_000_000 + parts * unit_ns, sleeps)


class OwnClocks:
    """The clocks of one's own process while its training thread stands at one place."""

    def __init__(self) -> None:
        self._since_ns = 0
        self._promised: dict[int, int] = {}
        """When other threads would have been woken first: one that was, and changed nothing, never will."""

    def wakes_at_ns(self, frame: Optional[FrameType], trains: int, since_ns: int) -> int:
        """Return when a clock wakes the training thread, or another thread that may let it go on; 0 where none will.

        ``trains`` is that thread's identity, ``since_ns`` since when it stands. What torch waits for in a collective
        has a clock as well, the group's timeout, and a loader looks after its workers: neither lets it go on.
        """
        if frame is None or _in_torch(frame):
            return 0
        if since_ns != self._since_ns:
            self._since_ns, self._promised = since_ns, {}
        threads = threading.enumerate()
        own = next((thread for thread in threads if thread.ident == trains), None)
        pid, now_ns = os.getpid(), epoch_ns()
        clock = None if own is None or own.native_id is None else clock_of(pid, own.native_id)
        if clock is not None and (clock.sleeps or clock.ends_at_ns - now_ns <= LONGEST_WAIT_NS):
            return max(clock.ends_at_ns, now_ns + 1)
        for thread in threads:
            if thread.daemon or thread is own or thread.native_id is None:
                continue
            other = clock_of(pid, thread.native_id)
            if other is None or other.ends_at_ns - now_ns > LONGEST_WAIT_NS:
                continue
            promised_ns = self._promised.setdefault(thread.native_id, other.ends_at_ns)
            if now_ns <= promised_ns:
                return promised_ns
        return 0


def _in_torch(frame: FrameType) -> bool:
    """Return whether torch waits: in a collective, in backward, for the workers of a loader."""
    inner: Optional[FrameType] = frame
    if _TORCH in frame.f_code.co_filename:
        return True
    while inner is not None:
        if _LOADER in inner.f_code.co_filename:
            return True
        inner = inner.f_back
    return False
