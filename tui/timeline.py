"""What was seen lately: the newest snapshot, those before it, and which one is on display."""

from __future__ import annotations

from collections import deque

from ddpdoctor.monitor.snapshot import Snapshot

KEPT_EVERY_NS = 1_000_000_000
KEPT_RANKS = 4_800
"""Snapshots times ranks that are kept: 10 minutes of 8 ranks; a big job gets fewer, so that memory stays flat."""
KEPT_MOST = 600
KEPT_LEAST = 10


class Timeline:
    """Keeps one snapshot a second, and where the display stands among them."""

    def __init__(self) -> None:
        self._kept: deque[Snapshot] = deque()
        self._newest: Snapshot | None = None
        self._shown: Snapshot | None = None
        """None: the newest one."""

    @property
    def newest(self) -> Snapshot | None:
        """The last snapshot that came."""
        return self._newest

    @property
    def shown(self) -> Snapshot | None:
        """The snapshot on display."""
        return self._shown or self._newest

    @property
    def paused(self) -> bool:
        """The display stands still."""
        return self._shown is not None

    @property
    def behind_ns(self) -> int:
        """How much older the display is than the newest snapshot."""
        if self._shown is None or self._newest is None:
            return 0
        return max(0, self._newest.now_ns - self._shown.now_ns)

    def add(self, snapshot: Snapshot) -> None:
        """Take a new snapshot."""
        if self._newest is not None and snapshot.now_ns < self._newest.now_ns:
            # The time of a replay was moved back: what comes later has not happened yet.
            self._kept.clear()
        self._newest = snapshot
        if not self._kept or snapshot.now_ns - self._kept[-1].now_ns >= KEPT_EVERY_NS:
            self._kept.append(snapshot)
        most = max(KEPT_LEAST, min(KEPT_MOST, KEPT_RANKS // max(1, len(snapshot.ranks))))
        while len(self._kept) > most:
            self._kept.popleft()

    def pause(self) -> None:
        """Hold the display; the snapshots continue."""
        self._shown = self.shown

    def resume(self) -> None:
        """Follow the newest snapshot again."""
        self._shown = None

    def step(self, steps: int) -> None:
        """Go back (negative) or forward among the kept snapshots; forward beyond the newest follows it again."""
        shown = self.shown
        if shown is None:
            return
        if steps < 0:
            earlier = [one for one in self._kept if one.now_ns < shown.now_ns]
            self._shown = earlier[max(steps, -len(earlier))] if earlier else shown
            return
        later = [one for one in self._kept if one.now_ns > shown.now_ns]
        self._shown = later[steps - 1] if len(later) >= steps else None
