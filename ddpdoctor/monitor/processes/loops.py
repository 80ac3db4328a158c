"""Suspects an endless loop of a rank that others wait for: it works in one function, longer than ever before."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import msgspec

from ddpdoctor.diagnosis.live.verdict import LastingWait
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.measured import StepTrack

SHORTEST_NS = 60_000_000_000
PAUSES = 20
"""A loop has to last for so many of the longest pauses that the rank has made, and for a minute."""
_WARM_UP = 2
_NEWEST = 32
_WORKING_SHARE = 0.7
"""Share of the time for which a thread in a loop runs or waits for a core; one that reads or waits is in none."""


class _Place(msgspec.Struct, frozen=True):
    pid: int
    file: str
    function: str
    step: int


class LoopDetector:
    """Remembers since when the late rank has been in one function."""

    def __init__(self, outer_pid: Callable[[int], int | None] = lambda pid: pid) -> None:
        """``outer_pid`` gives the number out here of a process that knows itself by another one."""
        self._outer_pid = outer_pid
        self._place: _Place | None = None
        self._since_ns = self._seen_ns = self._wanted_ns = 0
        self._stood_ns = self._stood_in = 0
        """The longest that a rank was in one function in the newest such step, and that step …"""
        self._longest_ns = 0
        """… and in any step that was followed by others: the evaluation of the epoch before."""

    def look(self, wait: LastingWait | None, record: RunRecord, now_ns: int) -> int | None:
        """Return the process that seems to be in an endless loop; None while none does."""
        rank = next((rank for rank in record.ranks if wait is not None and rank.rank == wait.late), None)
        if wait is None or wait.place is None or rank is None:
            self._leave()
            return None
        steps = next((track for track in record.step_tracks if track.rank == rank.rank), None)
        step = steps.step[-1] if steps is not None and len(steps) else 0
        if step > self._stood_in:
            self._longest_ns, self._stood_ns = max(self._longest_ns, self._stood_ns), 0
        place = _Place(rank.pid, wait.place.file, wait.place.function, step)
        outer = self._outer_pid(rank.pid)
        wanted_ns = None if outer is None else _wanted_core_ns(outer)
        if place != self._place or wanted_ns is None:
            self._leave()
            self._place, self._since_ns, self._seen_ns, self._wanted_ns = place, now_ns, now_ns, wanted_ns or 0
            return None
        self._seen_ns, lasted_ns = now_ns, now_ns - self._since_ns
        if lasted_ns < max(patience_of(steps), PAUSES * self._longest_ns):
            return None
        return rank.pid if wanted_ns - self._wanted_ns >= _WORKING_SHARE * lasted_ns else None

    def _leave(self) -> None:
        if self._place is not None:
            self._stood_in, self._stood_ns = self._place.step, max(self._stood_ns, self._seen_ns - self._since_ns)
        self._place = None


def patience_of(steps: StepTrack | None) -> int:
    """Return for how long, in ns, a rank with these steps may be at one place before that is no usual pause."""
    return max(SHORTEST_NS, PAUSES * _longest_pause_ns(steps))


def usual_interval_ns(steps: StepTrack) -> int:
    """Return the median time in ns from one of the newest steps to the next; 0 where there are not two."""
    ended = steps.ended_at_ns[-_NEWEST:]
    return int(median(after - before for before, after in pairwise(ended))) if len(ended) > 1 else 0


def _longest_pause_ns(steps: StepTrack | None) -> int:
    """Return the longest that a rank has taken for a step, or between two, its first ones apart; 0 where it has made
    none.
    """
    if steps is None:
        return 0
    started, ended = steps.started_at_ns[_WARM_UP:], steps.ended_at_ns[_WARM_UP:]
    lengths = [end - start for start, end in zip(started, ended, strict=True)]
    return max([*lengths, *(start - end for start, end in zip(started[1:], ended, strict=False))], default=0)


def _wanted_core_ns(pid: int) -> int | None:
    """Return for how long any thread of a process has run or waited for a core; None where not known."""
    most = None
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
                ran_ns, waited_ns, *_ = file.read().split()
            most = max(most or 0, int(ran_ns) + int(waited_ns))
    except (OSError, ValueError):
        return most
    return most
