"""Schedules of the learning rate that count the steps of other ranks than those that step them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Verdict
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.operators import TURNS, TURNS_OF_ALL, TURNS_OF_SHARE
from ddpdoctor.source.interpreter.values import (
    NONE,
    Function,
    Value,
    options_of,
    parts_of,
    tags_of,
)
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.training_loops import division
from ddpdoctor.source.script.module import descend

SCHEDULERS = (
    "torch.optim.lr_scheduler.",
    "transformers.get_",
    "transformers.optimization.get_",
    "diffusers.optimization.",
)
_COUNTS_OF_ALL = "counts the batches of all ranks, and it makes a step for each batch of this one"
_COUNTS_A_SHARE = "counts the N-th part of the batches of this rank, and it makes a step for each of them"


def lengths_of(projection: Projection, made: Event) -> Iterator[Value]:
    """Yield what a scheduler is given, and what the functions among that take from around them."""
    machine = projection.machine
    for value in (*made.positional, *made.named.values()):
        for option in (part for one in options_of(value) for part in (one, *parts_of(one))):
            yield from options_of(option)
            if isinstance(option, Function):
                used = {node.id for node in descend(option.node) if isinstance(node, ast.Name)}
                held = (machine.store.get(option.scope, name) for name in used)
                yield from (inner for one in held if one is not None for inner in options_of(one))


def loaders_counted(projection: Projection, made: Event, kind: str) -> set[int]:
    """Return the loaders whose batches a scheduler's length counts, in one of the ways of ``operators.TURNS``."""
    tags = frozenset[tuple[str, int]]().union(*map(tags_of, lengths_of(projection, made)))
    return {number for own, number in tags if own == kind}


def other_lengths(projection: Projection) -> Iterator[Verdict]:
    """Yield schedulers of one rank's steps whose length was multiplied or divided by the number of ranks."""
    machine, seen = projection.machine, set[ast.AST]()
    backwards = [{loop.node for loop in event.loops} for event in projection.in_course("backward")]
    for step in projection.in_course("training"):
        for option in options_of(step.receiver or NONE) if step.name == "step" else ():
            made = machine.object(option)
            if made is None or not made.name.startswith(SCHEDULERS) or made.ordinal in machine.prepared:
                continue
            if step.positional or step.named or {loop.node for loop in step.loops} not in backwards:
                continue
            for kind, what in ((TURNS_OF_ALL, _COUNTS_OF_ALL), (TURNS_OF_SHARE, _COUNTS_A_SHARE)):
                loaders = [machine.events.get(number) for number in loaders_counted(projection, made, kind)]
                divided = [one for one in loaders if one is not None and division(machine, one) == "sharded"]
                if not divided or len(divided) < len(loaders) or made.node in seen:
                    continue
                seen.add(made.node)
                ends = "never comes to its end" if kind == TURNS_OF_ALL else "ends after the N-th part of the training"
                yield Verdict(
                    sentence=f"the length of this schedule {what}: it {ends}",
                    remedy="Leave the number of ranks out of its length: len() of a loader whose sampler divides the "
                    "data is the number of batches of one rank.",
                    locations=made.location,
                    because=(
                        ("this loader's sampler has divided its batches between the ranks", divided[0].location),
                        ("here every rank makes a step of the schedule", step.location),
                    ),
                )


def short_once_prepared(projection: Projection, made: Event) -> bool:
    """Return whether a scheduler that makes a step for each process is as long as a loader that was divided before."""
    counted = loaders_counted(projection, made, TURNS) & projection.machine.prepared
    return bool(counted) and not loaders_counted(projection, made, TURNS_OF_ALL)
