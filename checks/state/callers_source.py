"""The callers by which a line in a function is come to, as evidence of what is said of the line."""

from __future__ import annotations

from collections.abc import Sequence

from ddpdoctor.finding import Fact
from ddpdoctor.source.events import Event

MAXIMUM_CALLERS = 3


def callers(events: Sequence[Event], text: str) -> tuple[Fact, ...]:
    """Return a fact for each of the first events that is in a called function, with the chain of calls to it."""
    return tuple(
        Fact(text=text, basis="source", location=event.location, stack=event.chain)
        for event in events[:MAXIMUM_CALLERS]
        if len({frame.function for frame in event.chain}) > 1
    )
