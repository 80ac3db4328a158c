"""Evaluation of a whole loader by one rank, which the others wait for in their next collective."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ddpdoctor.checks.collectives.long_wait.source import LongWait
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ALL_RANKS
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.sync_points import reported_lines, sync_events
from ddpdoctor.source.queries.training_loops import evaluating_forwards, only_loader
from ddpdoctor.source.ranks.ranks import numbers_in


def lone_evaluations(projection: Projection) -> Iterator[LongWait]:
    """Such loops, one for each rank test; none that other ranks run too, and none where nothing makes them wait."""
    meetings = [event for event in sync_events(projection) if event.ranks == ALL_RANKS and not event.in_parent]
    forwards = tuple(evaluating_forwards(projection)) if meetings else ()
    shared = {loop.node for event in projection.events if event.ranks == ALL_RANKS for loop in event.loops}
    hanging = reported_lines(projection)
    seen: set[ast.AST] = set()
    for forward in forwards:
        ranks = numbers_in(forward.ranks)
        guard = next((guard for guard in forward.guards if guard.arm == forward.ranks and not guard.guessed), None)
        if len(ranks) != 1 or guard is None:
            continue
        own = (loop for loop in forward.loops if loop.node not in shared)
        loop = next((loop for loop in own if only_loader(projection, loop) is not None), None)
        meeting = _next_meeting(forward, meetings)
        if loop is None or meeting is None or {loop.node, guard.node} & seen:
            continue
        seen |= {loop.node, guard.node}
        place = loop.module.head_location(loop.node)
        if not any((frame.file, frame.line) in hanging for frame in forward.chain):
            yield LongWait(
                what=f"rank {ranks[0]} evaluates alone",
                location=place,
                condition=guard.module.excerpt(guard.node),
                condition_location=guard.module.location(guard.node),
                collective=meeting.name,
                collective_location=meeting.module.location(meeting.node),
            )


def _next_meeting(forward: Event, meetings: Sequence[Event]) -> Event | None:
    """Return the collective that the others come to meanwhile: behind it, or in the next turn of a loop around both."""
    behind = next((event for event in meetings if event.ordinal > forward.ordinal), None)
    if behind is not None:
        return behind
    around = {loop.node for loop in forward.loops if not loop.once}
    return next((event for event in meetings if any(loop.node in around for loop in event.loops)), None)
