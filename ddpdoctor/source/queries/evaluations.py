"""Forwards without gradients: which of them are of the model that is trained, and which loader they go over."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.source.events import Event, LoopAround
from ddpdoctor.source.interpreter.values import ExternalObject, options_of, tags_of
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.torch_model.recorded_training import UNWRAPPED_FORWARD
from ddpdoctor.source.vocabulary import DATA_LOADER


def evaluating_forwards(projection: Projection) -> Iterator[Event]:
    """Yield the forwards without gradients of the model that is trained: where DDP holds one, it is that one."""
    outside = "bare forward" if any(projection.of_kind("wrap")) else UNWRAPPED_FORWARD
    for event in projection.in_course("ddp-forward", "training"):
        if not event.gradients and (event.kind == "ddp-forward" or event.name == outside):
            yield event


def only_loader(projection: Projection, loop: LoopAround) -> Event | None:
    """Return the one loader that a loop certainly runs over."""
    numbers = {number for kind, number in tags_of(loop.iterable) if kind in ("loader", "batch")}
    for option in options_of(loop.iterable):
        if isinstance(option, ExternalObject) and option.name == DATA_LOADER:
            numbers.add(option.number)
        elif not tags_of(option):
            return None
    return projection.machine.events.get(numbers.pop()) if len(numbers) == 1 else None
