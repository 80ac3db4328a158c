"""Evaluation that every rank does over the whole data set."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.source.events import Event, LoopAround
from ddpdoctor.source.interpreter.values import ALL_RANKS
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.training_loops import (
    by_engine,
    division,
    evaluating_forwards,
    feedings,
    only_loader,
    through_ddp,
)


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
    evaluating = tuple(evaluating_forwards(projection))
    seen = {loop.node for event in evaluating for loop in event.loops if not _is_whole(projection, loop)}
    for forward in evaluating:
        if forward.ranks != ALL_RANKS or forward.guards:
            continue
        for loop in forward.loops:
            loader = only_loader(projection, loop)
            if loader is None or loop.node in seen or loader.ordinal in training or loader.guards:
                continue
            seen.add(loop.node)
            yield RepeatedEvaluation(forward, loop, loader)


def _is_whole(projection: Projection, loop: LoopAround) -> bool:
    """Return whether a loop goes over the whole data set, this time: what is left by a divided one is done by all
    ranks.
    """
    loader = only_loader(projection, loop)
    return loader is not None and division(projection.machine, loader) == "whole"
