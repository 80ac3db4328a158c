"""Evaluation that every rank does over the whole data set."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.source.events import Event, LoopAround
from ddpdoctor.source.interpreter.values import ALL_RANKS, ExternalObject, options_of, tags_of
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.training_loops import by_engine, division, feedings, through_ddp
from ddpdoctor.source.torch_model.recorded_training import UNWRAPPED_FORWARD
from ddpdoctor.source.vocabulary import DATA_LOADER


class RepeatedEvaluation(msgspec.Struct, frozen=True, eq=False):
    """A loop over a whole data set without gradients, on every rank."""

    forward: Event
    loop: LoopAround
    loader: Event


def repeated_evaluations(projection: Projection) -> Iterator[RepeatedEvaluation]:
    """Loops without gradients in which every rank runs the model over the same samples, each once."""
    training = {feeding.loader.ordinal for feeding in feedings(projection)}
    if not training and not any(
        through_ddp(projection, one) or by_engine(one) for one in projection.in_course("backward")
    ):
        return
    wrapped = any(projection.of_kind("wrap"))
    forwards = [event for event in projection.in_course("ddp-forward", "training") if _is_forward(event, wrapped)]
    evaluating = [event for event in forwards if not event.gradients]
    seen = {loop.node for event in evaluating for loop in event.loops if not _is_whole(projection, loop)}
    for forward in evaluating:
        if forward.ranks != ALL_RANKS or forward.guards:
            continue
        for loop in forward.loops:
            loader = _only_loader(projection, loop)
            if loader is None or loop.node in seen or loader.ordinal in training or loader.guards:
                continue
            seen.add(loop.node)
            yield RepeatedEvaluation(forward, loop, loader)


def _is_whole(projection: Projection, loop: LoopAround) -> bool:
    """Return whether a loop goes over the whole data set, this time: what is left by a divided one is done by all
    ranks.
    """
    loader = _only_loader(projection, loop)
    return loader is not None and division(projection.machine, loader) == "whole"


def _is_forward(event: Event, wrapped: bool) -> bool:
    """Return whether an event is a forward of the model that is trained: where DDP holds one, it is that one."""
    return event.kind == "ddp-forward" or event.name == ("bare forward" if wrapped else UNWRAPPED_FORWARD)


def _only_loader(projection: Projection, loop: LoopAround) -> Event | None:
    """Return the one loader that a loop certainly runs over."""
    numbers = {number for kind, number in tags_of(loop.iterable) if kind in ("loader", "batch")}
    for option in options_of(loop.iterable):
        if isinstance(option, ExternalObject) and option.name == DATA_LOADER:
            numbers.add(option.number)
        elif not tags_of(option):
            return None
    return projection.machine.events.get(numbers.pop()) if len(numbers) == 1 else None
