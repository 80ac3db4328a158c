"""Keeps what a process did before it was known which rank it is, as in scripts that start their ranks themselves."""

from __future__ import annotations

from collections.abc import Container, Iterable

from ddpdoctor.record import events
from ddpdoctor.record.events import Event, Row

_OF_A_RANK = (events.Sample, events.PassEnded, events.PassTrained, events.PassProgress, events.StateLoaded)
_WAITS = (events.WaitBegun, events.Led, events.WaitEnded)
"""A process that waits for its world has no rank yet, and may never have one: these count at once, and again later."""


class EarlyEvents:
    """Hands out events that mean something of a rank only, in their order, once the rank of their process is known."""

    def __init__(self, rows: Container[str]) -> None:
        """``rows``: names of the rows that mean something of a rank only."""
        self._rows = rows
        self._held: dict[int, list[Event | Row]] = {}

    def due(self, pid: int, event: Event | Row, *, is_rank: bool) -> Iterable[Event | Row]:
        """What is to be taken in now that ``event`` was read."""
        if is_rank:
            return (*self._held.pop(pid, ()), event)
        if isinstance(event, _OF_A_RANK) or (isinstance(event, Row) and event.kind in self._rows):
            self._held.setdefault(pid, []).append(event)
            return ()
        if isinstance(event, _WAITS):
            self._held.setdefault(pid, []).append(event)
        return (event,)
