"""Keeps what a process did before it was known which rank it is, as in scripts that start their ranks themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_OF_A_RANK = frozenset(
    {"loader", "sample", "pass_begun", "pass_ended", "pass_trained", "pass_progress", "training_state", "state_loaded"}
)
_WAITS = frozenset({"wait_begun", "led", "wait_ended"})
"""A process that waits for its world has no rank yet, and may never have one: these count at once, and again later."""

Event = dict[str, Any]


class EarlyEvents:
    """Hands out events that mean something of a rank only, in their order, once the rank of their process is known."""

    def __init__(self, of_a_rank: Iterable[str]) -> None:
        self._of_a_rank = _OF_A_RANK.union(of_a_rank)
        self._held: dict[int, list[Event]] = {}

    def due(self, pid: int, event: Event, *, is_rank: bool) -> Iterable[Event]:
        """What is to be taken in now that ``event`` was read."""
        if is_rank:
            return (*self._held.pop(pid, ()), event)
        if event["event"] in self._of_a_rank:
            self._held.setdefault(pid, []).append(event)
            return ()
        if event["event"] in _WAITS:
            self._held.setdefault(pid, []).append(event)
        return (event,)
