"""Forwards of a DDP model without gradients that only some ranks run."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import msgspec

from ddpdoctor.finding import Frame, Location
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ALL_RANKS
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.torch_model.buffers import has_buffers
from ddpdoctor.source.torch_model.ddp import synchronises_buffers


class LoneForward(msgspec.Struct, frozen=True, kw_only=True):
    """A forward under ``no_grad`` that a rank test keeps from some ranks."""

    location: Location
    ranks: int
    """Mask of the ranks that run it."""
    condition_location: Location | None
    """The rank test around it; None when the others left before."""
    chain: tuple[Frame, ...]


def lone_forwards(projection: Projection) -> Iterator[LoneForward]:
    """Such forwards of models that certainly hold buffers, in a script that also trains the model."""
    machine = projection.machine
    trained = any(event.receiver is not None for event in projection.of_kind("backward"))
    forwards = [event for event in projection.of_kind("ddp-forward") if not event.gradients]
    seen: set[ast.AST] = set()
    """Forwards, or the rank tests around them: what one test keeps from ranks has one cause."""
    for event in forwards:
        made = machine.object(event.receiver) if event.receiver is not None else None
        module = made.argument("module", 0) if made is not None else None
        if not trained or made is None or module is None or event.ranks == ALL_RANKS or event.node in seen:
            continue
        if _matched(event, forwards) or not synchronises_buffers(made) or not has_buffers(machine, module):
            continue
        guard = next((guard for guard in reversed(event.guards) if guard.arm != ALL_RANKS), None)
        cause = guard.node if guard is not None else event.node
        if cause in seen:
            continue
        seen |= {event.node, cause}
        yield LoneForward(
            location=event.module.location(event.node),
            ranks=event.ranks,
            condition_location=guard.module.location(guard.node) if guard is not None else None,
            chain=event.chain,
        )


def _matched(event: Event, forwards: list[Event]) -> bool:
    """Return whether the other ranks run a forward too: the same line by another way, or the other arm of the same
    test.
    """
    for other in forwards:
        if other is event or not other.ranks & ~event.ranks:
            continue
        same_test = bool(event.guards and other.guards) and event.guards[-1].node is other.guards[-1].node
        if other.node is event.node or same_test:
            return True
    return False
