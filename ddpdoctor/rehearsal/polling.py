"""Tells a rank that asks again and again for a file that is not there, from one that waits for nothing."""

from __future__ import annotations

import threading
import time

from ..probe.journal import Journal

TOLD_AFTER = 3
"""A question asked so often, with nothing but sleep between, is a poll."""
_PATHS_HELD = 64


class Polling:
    """Counts the main thread's questions for paths that are not there, since it last did anything else."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._activity: tuple[int, ...] = ()
        self._asked: dict[tuple[int, str], tuple[int, int]] = {}
        """How often each line has asked for each path, and since when."""

    def asked(self, path: str, site: int, *, found: bool) -> None:
        """A line of the user's has asked for a path, or tried to read it."""
        journal = self._journal
        ring = journal.ring
        if ring is None or threading.current_thread() is not threading.main_thread():
            return
        activity = (ring.count, journal.forwards, journal.backwards, journal.optimizer_steps)
        if found or activity != self._activity or len(self._asked) >= _PATHS_HELD:
            self._activity = activity
            self._asked.clear()
            ring.note_polling(0, 0)
        if found:
            return
        now_ns = time.time_ns()
        times, since_ns = self._asked.get((site, path), (0, now_ns))
        self._asked[site, path] = times + 1, since_ns
        if times + 1 >= TOLD_AFTER:
            ring.note_polling(since_ns, now_ns)
