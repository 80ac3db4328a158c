"""Keeps work that recurs from taking more than its share of a core, however many ranks there are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Pace:
    """When one kind of work is due again: the dearer it was, the later."""

    def __init__(self, every_ns: int, at_most_ns: int, share: float, most_share: float = 1.0) -> None:
        """``every_ns`` apart, and further while the work takes more than ``share`` of a core; ``at_most_ns`` apart.

        Further than that only while it would take more than ``most_share``, as with thousands of ranks. What the first
        time costs tells nothing of the next: it pays for what is imported then.
        """
        self._most_share = most_share
        self._every_ns = every_ns
        self._at_most_ns = at_most_ns
        self._share = share
        self._due_at_ns = 0
        self.cost_ns = 0
        """What it cost last."""
        self._is_first = True

    def is_due(self, now_ns: int) -> bool:
        """Return whether it is time for the work."""
        return now_ns >= self._due_at_ns

    @contextmanager
    def work(self, now_ns: int) -> Iterator[None]:
        """Note what the work in the body costs."""
        began_ns = time.thread_time_ns()
        try:
            yield
        finally:
            cost_ns = 0 if self._is_first else time.thread_time_ns() - began_ns
            self._is_first = False
            self.cost_ns = cost_ns
            wanted_ns = min(self._at_most_ns, max(self._every_ns, int(cost_ns / self._share)))
            self._due_at_ns = now_ns + max(wanted_ns, int(cost_ns / self._most_share))
