"""What the ranks of this node get of its cores and its shared memory, from what the system says of their processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from ddpdoctor.diagnosis.wording import rank_list
from ddpdoctor.launch.pid_namespaces import OuterPids
from ddpdoctor.record.assembly.ranks import RankBook
from ddpdoctor.record.ring_reader import RingTail
from ddpdoctor.record.streams.measured import HostUse

# Ranks whose processes do not show from here, as those of another container: their beat says that they live.

FIRST_BEAT_WITHIN_NS = 2_000_000_000
"""A rank beats five times a second: one that has not beaten for so long, when it is first met or wrote its end, is
gone."""
SILENT_FOR_NS = 60_000_000_000
"""One that said nothing of its end may be in a call that holds its interpreter; no one waits longer for it to
continue.
"""


class UnseenRanks:
    """Tells which of the processes that were never seen live."""

    def __init__(self, outer: OuterPids) -> None:
        self._outer = outer
        self._beats: dict[int, int] = {}
        """The newest beat of each, …"""
        self._beaten_at_ns: dict[int, int] = {}
        """… and when that was found."""
        self._beating: set[int] = set()
        """Those that have beaten while they were not seen."""
        self._over: set[int] = set()
        """Those that have written their end."""

    def look(self, rings: Mapping[int, RingTail], book: RankBook, now_ns: int) -> None:
        """Take down who has beaten since the last look."""
        for pid, ring in rings.items():
            if self._outer.was_seen(pid):
                self._beating.discard(pid)
                continue
            beat_ns = ring.heartbeat().beat_at_ns
            if pid not in self._beats:
                self._beaten_at_ns[pid] = beat_ns or now_ns  # One container has the clock of the other.
            elif beat_ns != self._beats[pid]:
                self._beaten_at_ns[pid] = now_ns
                self._beating.add(pid)
            self._beats[pid] = beat_ns
            entry = book.processes.get(pid)
            if entry is not None and (entry.exit is not None or entry.os_exit is not None):
                self._over.add(pid)

    def live(self, pid: int, now_ns: int) -> bool:
        """Return whether a process that was never seen still beats, or may."""
        patience_ns = SILENT_FOR_NS if pid in self._beating - self._over else FIRST_BEAT_WITHIN_NS
        return not self._outer.was_seen(pid) and now_ns < self._beaten_at_ns.get(pid, 0) + patience_ns

    def may_live(self, pid: int, now_ns: int) -> bool:
        """Return whether no one knows of the end of one that was never seen, however long it has been silent."""
        return pid in self._beating - self._over or self.live(pid, now_ns)

    def note(self, book: RankBook) -> str:
        """Return what cannot be known of those that beat, as a sentence; empty without any."""
        ranks = sorted(rank for rank, pid in book.pids().items() if pid in self._beating)
        if not ranks:
            return ""
        processes = "process" if len(ranks) == 1 else "processes"
        return (
            f"the {processes} of {rank_list(ranks)} cannot be seen from here (another container?): divergences are "
            "reported, but stuck or killed ranks are not; watch the run where its ranks run"
        )


LOOK_EVERY_NS = 5_000_000_000
_BUSY_SHARE = 0.1
_PRESSED_SHARE = 0.1
"""Threads are counted only where the main thread waits for a core for so much of the time."""
_FULL_SHARE = 0.15
"""Who holds shared memory is looked up only when less than this is free."""


class Hosts:
    """Watches the processes of the ranks; any process may be gone at any time."""

    def __init__(self) -> None:
        self._looked_at_ns = 0
        self._first: dict[int, tuple[int, int]] = {}
        """By process when it was first looked at, and how long its main thread had waited for a core by then."""
        self._last: dict[int, tuple[int, int]] = {}
        self._counted: dict[int, tuple[int, dict[str, int]]] = {}
        """By process when its threads were counted last, and how long each had run by then."""
        self._uses: dict[int, HostUse] = {}

    def look(self, pids: Mapping[int, int], now_ns: int) -> tuple[HostUse, ...]:
        """Return what is known of the processes, given by rank; they are looked at every few seconds."""
        if now_ns - self._looked_at_ns >= LOOK_EVERY_NS:
            self._looked_at_ns = now_ns
            for rank, pid in pids.items():
                self._take(rank, pid, now_ns)
        return tuple(self._uses[pid] for _, pid in sorted(pids.items()) if pid in self._uses)

    def _take(self, rank: int, pid: int, now_ns: int) -> None:
        scheduled = scheduled_of(pid)
        if scheduled is None:
            return
        waited_ns = scheduled.waited_ns
        first = self._first.setdefault(pid, (now_ns, waited_ns))
        before = self._last.get(pid, first)
        self._last[pid] = (now_ns, waited_ns)
        known = self._uses.get(pid, HostUse(rank=rank))
        size, free = _shared_memory(pid)
        least = min(free, known.shared_memory_free_bytes) if known.shared_memory_bytes else free
        interval_ns = now_ns - before[0]
        pressed = interval_ns > 0 and waited_ns - before[1] >= _PRESSED_SHARE * interval_ns
        self._uses[pid] = msgspec.structs.replace(
            known,
            watched_ns=now_ns - first[0],
            main_waited_ns=waited_ns - first[1],
            cores=_cores(pid),
            busy_threads=self._busy_threads(pid, now_ns) if pressed else known.busy_threads,
            shared_memory_bytes=size,
            shared_memory_free_bytes=least,
            maps_shared_memory=known.maps_shared_memory
            or (free < _FULL_SHARE * size and any(map(_maps_shared_memory, _family(pid)))),
        )

    def _busy_threads(self, pid: int, now_ns: int) -> int:
        """Threads of a process and of those that it started that ran a good part of the time since the last count."""
        now = {thread: scheduled.ran_ns for one in _family(pid) for thread, scheduled in scheduled_threads(one)}
        counted_ns, before = self._counted.get(pid, (now_ns, now))
        self._counted[pid] = now_ns, now
        enough_ns = max(1.0, _BUSY_SHARE * (now_ns - counted_ns))
        return sum(ran_ns - before.get(thread, ran_ns) >= enough_ns for thread, ran_ns in now.items())


class Scheduled(NamedTuple):
    """What a thread has got of the cores."""

    ran_ns: int
    waited_ns: int
    """For a core."""
    runs: int
    """How often it was given one."""


def scheduled_of(pid: int, thread: int | str = "") -> Scheduled | None:
    """Return the scheduler's account of a thread, by default the main one; None where the system does not tell."""
    try:
        with open(f"/proc/{pid}/task/{thread or pid}/schedstat", encoding="ascii") as file:
            ran_ns, waited_ns, runs = map(int, file.read().split())
        return Scheduled(ran_ns, waited_ns, runs)
    except (OSError, ValueError):
        return None


def scheduled_threads(pid: int) -> Iterator[tuple[str, Scheduled]]:
    """Yield the same of every thread of a process, by its number."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        scheduled = scheduled_of(pid, thread)
        if scheduled is not None:
            yield thread, scheduled


def _family(pid: int) -> list[int]:
    """A process and all that it started."""
    import psutil

    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return [pid]


def _cores(pid: int) -> int:
    try:
        return len(os.sched_getaffinity(pid))
    except (AttributeError, OSError):
        return 0


def _shared_memory(pid: int) -> tuple[int, int]:
    """Size of a process's /dev/shm and what is free of it; zeros where there is none."""
    try:
        state = os.statvfs(f"/proc/{pid}/root/dev/shm")
    except OSError:
        return 0, 0
    return state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize


def _maps_shared_memory(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            return any("/dev/shm/" in line for line in file)
    except OSError:
        return False
