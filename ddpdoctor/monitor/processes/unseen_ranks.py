"""Ranks whose processes do not show from here, as those of another container: their beat says that they live."""

from __future__ import annotations

from collections.abc import Mapping

from ddpdoctor.diagnosis.wording import rank_list
from ddpdoctor.launch.pid_namespaces import OuterPids
from ddpdoctor.record.assembly.ranks import RankBook
from ddpdoctor.record.ring_reader import Beating

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

    def look(self, rings: Mapping[int, Beating], book: RankBook, now_ns: int) -> None:
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
