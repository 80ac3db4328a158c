"""Tells a rank that asks again and again for a file, and gets one answer, from one that does something."""

from __future__ import annotations

import threading
import time

from ...journal import Journal

TOLD_AFTER = 3
"""A question asked so often, with nothing but sleep between, is a poll."""
_PATHS_HELD = 64


class Polling:
    """Counts the main thread's questions for paths, and their answers, since it last did anything else."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._activity: tuple[int, ...] = ()
        self._asked: dict[tuple[int, str, bool], tuple[int, int]] = {}
        """How often each line has asked for each path and got the answer, and since when."""

    def asked(self, path: str, site: int, *, found: bool) -> None:
        """A line of the user's has asked whether there is a path, or tried in vain to read it."""
        ring = self._journal.ring
        if ring is None or threading.current_thread() is not threading.main_thread():
            return
        journal = self._journal
        activity = (ring.count, journal.forwards, journal.backwards, journal.optimizer_steps)
        other_answer = (site, path, not found) in self._asked
        if other_answer or activity != self._activity or len(self._asked) >= _PATHS_HELD:
            self.did_something()
            self._activity = activity
        now_ns = time.time_ns()
        times, since_ns = self._asked.get((site, path, found), (0, now_ns))
        self._asked[site, path, found] = times + 1, since_ns
        if times + 1 >= TOLD_AFTER:
            ring.note_polling(since_ns, now_ns)

    def did_something(self) -> None:
        """What was asked before is over."""
        self._asked.clear()
        if self._journal.ring is not None:
            self._journal.ring.note_polling(0, 0)
