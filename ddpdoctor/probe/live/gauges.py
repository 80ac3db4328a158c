"""Figures that hooks add up over the steps, and that the heartbeat's thread writes by name.

A hook keeps a total and registers how it is read; the record has it as ``gauges``, and the page of a rank shows it.
"""

from __future__ import annotations

from typing import Callable

from ..journal import Journal

EVERY_STEPS = 10
EVERY_SHARE = 100
"""A total is written after so many more steps, or a hundredth more of them where that is more, and at the end: an event
costs about 10 µs, and only the newest counts. So a run of days, or of a million steps, adds a thousand of each."""


class Gauges:
    """The totals of one rank."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._readers: dict[tuple[str, str], Callable[[], int]] = {}
        self._first: dict[tuple[str, str], tuple[int, int]] = {}
        """Step and total at the first look: what was before training counts for no step."""
        self._written_step = 0

    def add(self, name: str, unit: str, total: Callable[[], int]) -> None:
        """Register a total, in ``unit`` (``ns``, ``bytes`` or ``count``), under the ``name`` that the screen shows.

        It only grows, and is shown a step: a level (memory, a temperature) has no meaning a step.
        """
        self._readers[name, unit] = total

    def look(self, step: int, last: bool = False) -> None:
        """Write every total where enough steps were made since the last time; called from the heartbeat's thread."""
        if not step:
            return
        is_due = last or step - self._written_step >= max(EVERY_STEPS, self._written_step // EVERY_SHARE)
        for key, total in self._readers.items():
            first_step, first = self._first.setdefault(key, (step, total()))
            if is_due and step > first_step:
                name, unit = key
                self._journal.event("gauge", name=name, unit=unit, total=total() - first, steps=step - first_step)
        if is_due:
            self._written_step = step
