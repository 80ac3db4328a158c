"""Clocks of a watched job: threads that a clock of their own will wake, a stopwatch of phases, times on the device.

The kernel shows what system call a thread is in, with its arguments: of the threads of one's own process, and of
processes below one's own. Elsewhere than on Linux, and on other processors, nothing is known of clocks.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
from types import FrameType
from typing import Any, Callable, NamedTuple, Optional

from ...record import layout
from ...record.writer import epoch_ns, from_system, offset_ns
from ..journal import Journal
from ..torch_compat import on_call

# In which phase the training thread is, and for how long it has been in each; one phase at a time.

(STARTING, DATA_WAIT, FORWARD, BACKWARD, EXPLICIT, OPTIMIZER, EVALUATION, SAVING, OTHER, FINISHED) = range(
    len(layout.PHASES)
)
"""Positions in a tally: of the time in each phase …"""
(
    EXPLICIT_CALLS,
    EXPLICIT_BYTES,
    SAMPLES,
    BATCHES,
    MICRO_BATCHES,
    SYNCHRONISED,
    REDUCED_BYTES,
    BUCKETS,
    TALLIED,
) = range(len(layout.PHASES), len(layout.PHASES) + 9)
"""… and of what is counted."""


class Stopwatch:
    """The phases of one thread."""

    __slots__ = ("_outer", "phase", "since_ns", "tally")

    def __init__(self) -> None:
        self.tally = [0] * TALLIED
        self.phase = OTHER
        self.since_ns = time.monotonic_ns()
        self._outer: list[int] = []

    def enter(self, phase: int, now_ns: int) -> None:
        """Begin a phase inside of the current one."""
        self.tally[self.phase] += now_ns - self.since_ns
        self._outer.append(self.phase)
        self.phase = phase
        self.since_ns = now_ns

    def leave(self, now_ns: int) -> None:
        """End the current phase and go on with the one around it."""
        self.tally[self.phase] += now_ns - self.since_ns
        self.phase = self._outer.pop() if self._outer else OTHER
        self.since_ns = now_ns

    def settled(self, now_ns: int) -> list[int]:
        """Return the tally up to now, as a copy."""
        self.tally[self.phase] += now_ns - self.since_ns
        self.since_ns = now_ns
        return self.tally[:]

    def restart(self, now_ns: int) -> None:
        """Begin a new tally."""
        self.tally = [0] * TALLIED
        self.since_ns = now_ns

    def give_back(self, taken: list[int]) -> None:
        """Subtract what belongs to an earlier step."""
        self.tally = [value - other for value, other in zip(self.tally, taken)]

    def reset(self) -> None:
        """Forget phases that were left by an exception which no hook saw."""
        self._outer.clear()
        self.phase = OTHER


# Times of the phases by CUDA events: read when the device has passed them, never waited for.

MEASURED_EVERY = 20
"""One step of so many is measured; an event costs some microseconds."""
_PHASES = (FORWARD, BACKWARD, OPTIMIZER)


class GraphCaptures:
    """Whether a graph is captured now; after a capture that has failed that is not known, and nothing is measured."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Whoever reads events holds it, so that no capture begins meanwhile."""
        self.open = False

    def listen(self, journal: Journal, graph_class: Any) -> None:
        """Listen to the captures of ``torch.cuda.CUDAGraph``, which makes those of ``torch.compile``, too."""
        for name, is_open in (("capture_begin", True), ("capture_end", False)):
            if hasattr(graph_class, name):
                # Before a capture begins, and after it has ended.
                moment = "before" if is_open else "after"
                on_call(journal, graph_class, name, **{moment: self._becoming(is_open)}, harms=())

    def _becoming(self, is_open: bool) -> Callable[..., None]:
        def become(*call: Any) -> None:
            with self.lock:
                self.open = is_open

        return become


class DeviceTimes:
    """The events of one step. ``make_event`` gives an event that keeps its time."""

    def __init__(self, make_event: Callable[[], Any], captures: GraphCaptures) -> None:
        self._make_event = make_event
        self._captures = captures
        self._in_a_graph = False
        self._spans: dict[int, list[list[Any]]] = {phase: [] for phase in _PHASES}

    def begins(self, phase: int) -> None:
        """Begin a phase on the host."""
        if self._may_be_measured():
            self._spans[phase].append([self._recorded()])

    def ends(self, phase: int) -> None:
        """End it on the host."""
        spans = self._spans[phase]
        if self._may_be_measured() and spans and len(spans[-1]) == 1:
            spans[-1].append(self._recorded())

    def durations_ns(self) -> list[int]:
        """Return forward, backward and optimizer in the order of the stream; -1 for what the device has not passed."""
        with self._captures.lock:
            if self._in_a_graph or self._captures.open:
                return [-1] * len(_PHASES)
            return [self._duration_ns(self._spans[phase]) for phase in _PHASES]

    def _may_be_measured(self) -> bool:
        self._in_a_graph = self._in_a_graph or self._captures.open
        return not self._in_a_graph

    def _recorded(self) -> Any:
        event = self._make_event()
        event.record()
        return event

    def _duration_ns(self, spans: list[list[Any]]) -> int:
        whole = [span for span in spans if len(span) == 2]
        if not whole or not all(span[1].query() for span in whole):
            return -1
        return round(sum(float(span[0].elapsed_time(span[1])) for span in whole) * 1e6)


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
        text = read_kernel(path)
        words = text.split()
        name = _MACHINE.get(int(words[0])) if len(words) >= 7 else None
        clock = _clock(pid, name, [int(word, 16) for word in words[1:7]]) if name is not None else None
        # A thread that went on meanwhile has put something else where its time was: seen as a year beyond 64 bits.
        return clock if clock is not None and read_kernel(path) == text else None
    except (OSError, ValueError, struct.error):
        return None


def read_kernel(path: str) -> bytes:
    """Return the start of a file of the kernel's about this process, counted as the probe's own reading.

    Whatever the heartbeat reads uncounted makes a rank that stands look as if it did something.
    """
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
