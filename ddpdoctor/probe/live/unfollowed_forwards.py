"""Training forwards that no backward followed: where no loader counts, they alone show that a rank left a step out.

A module has left one out when it runs its next forward from the same place before any backward has come, and that one
or a later one from there is followed by a backward. Forwards from another place (an evaluation that records gradients)
leave nothing out, and neither do those that raised: the same batch is tried again. A loop that sums the losses of
several forwards leaves out as many on every rank, which is for the diagnosis to compare.
"""

from __future__ import annotations

from types import FrameType
from typing import Any, Callable, NamedTuple, Optional

from .observer import Observer
from .reductions import Reducer

NONE_OPEN = -1
MOST_WRITTEN = 64
"""Events of one module: a loop with several forwards for each backward has one a step, on every rank."""


class Unfollowed(NamedTuple):
    """Forwards that will have been left out if a backward follows the newest."""

    forwards: int
    step: int
    site: int


class UnfollowedForwards:
    """The forwards of each DDP module that are not the first since the newest backward."""

    def __init__(self, observer: Observer, wrap_number: Callable[[Any], Optional[int]]) -> None:
        self._observer = observer
        self._wrap_number = wrap_number
        self._written: dict[int, int] = {}

    def look(self, ddp: Any, reducer: Reducer, place: tuple[Any, ...], frame: FrameType) -> None:
        """Count a forward at a ``place`` that begins after an open one, or after some that were not followed."""
        if reducer.opened_at != self._observer.backwards_over:
            self._write(ddp, reducer)
        elif reducer.place != place:
            reducer.unfollowed = None
        elif reducer.unfollowed is not None:
            reducer.unfollowed = reducer.unfollowed._replace(forwards=reducer.unfollowed.forwards + 1)
        else:
            self._observer.moments.take_in()
            site = self._observer.journal.site(frame)
            reducer.unfollowed = Unfollowed(1, self._observer.steps.of_newest_forward, site)

    def _write(self, ddp: Any, reducer: Reducer) -> None:
        """Write the forwards before the newest one, which are certain once a backward has followed that."""
        found, wrap = reducer.unfollowed, self._wrap_number(ddp)
        reducer.unfollowed = None
        if found is None or wrap is None:
            return
        written = self._written[wrap] = self._written.get(wrap, 0) + 1
        if written <= MOST_WRITTEN:
            self._observer.journal.event(
                "unfollowed_forward", wrap=wrap, last=written == MOST_WRITTEN, **found._asdict()
            )
