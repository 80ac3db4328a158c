"""Schedules of the learning rate whose length counts the batches of all ranks, or a part of one rank's."""

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
from ddpdoctor.source.ranks.ranks import WORLD_SIZE
from ddpdoctor.source.script.module import descend, last_name, made_from

SCHEDULERS = (
    "torch.optim.lr_scheduler.",
    "transformers.get_",
    "transformers.optimization.get_",
    "diffusers.optimization.",
)
_COUNTS_OF_ALL = (
    "counts the batches of all ranks, but it steps once for each batch of one rank: training stops after 1/N"
)
_SIZES = frozenset({"world", "world_size", "get_world_size", "num_processes"})
_COUNTS_A_SHARE = "is 1/N of the batches of one rank, and it steps once for each of them: it ends after 1/N of training"


def lengths_of(projection: Projection, made: Event) -> Iterator[Value]:
    """Yield what a scheduler is given, and what the functions among that take from around them."""
    machine = projection.machine
    for value in (*made.positional, *made.named.values()):
        for option in (part for one in options_of(value) for part in (one, *parts_of(one))):
            yield from options_of(option)
            if isinstance(option, Function):
                used = _returned_names(option.node)
                held = [machine.store.get(option.scope, name) for name in used]
                if used & _SIZES or any(one is not None and tags_of(one) == WORLD_SIZE.tags for one in held):
                    return  # What it makes of the length may undo what the length was multiplied by.
                yield from (inner for one in held if one is not None for inner in options_of(one))


def _returned_names(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    """Return the variables that the result of a function is made of."""
    returns = [one.value for one in descend(function) if isinstance(one, ast.Return) and one.value is not None]
    results = [function.body] if isinstance(function, ast.Lambda) else returns
    parts = (node for one in results for node in made_from(one, function))
    return {last_name(node) for node in parts} - {""}


def loaders_counted(projection: Projection, made: Event, kind: str) -> set[int]:
    """Return the loaders whose batches a scheduler's length counts, in one of the ways of ``operators.TURNS``."""
    tags = frozenset[tuple[str, int]]().union(*map(tags_of, lengths_of(projection, made)))
    return {number for own, number in tags if own == kind}


def other_lengths(projection: Projection) -> Iterator[Verdict]:
    """Yield schedulers of one rank's steps whose length was multiplied or divided by the number of ranks."""
    machine, seen = projection.machine, set[ast.AST]()
    backwards = {
        (frozenset(loop.node for loop in event.loops), event.conditions) for event in projection.in_course("backward")
    }
    for step in projection.in_course("training"):
        for option in options_of(step.receiver or NONE) if step.name == "step" else ():
            made = machine.object(option)
            if made is None or not made.name.startswith(SCHEDULERS) or made.ordinal in machine.prepared:
                continue
            turns = frozenset(loop.node for loop in step.loops), step.conditions
            if step.positional or step.named or turns not in backwards:
                continue
            for kind, what in ((TURNS_OF_ALL, _COUNTS_OF_ALL), (TURNS_OF_SHARE, _COUNTS_A_SHARE)):
                loaders = [machine.events.get(number) for number in loaders_counted(projection, made, kind)]
                divided = [one for one in loaders if one is not None and division(machine, one) == "sharded"]
                if not divided or len(divided) < len(loaders) or made.node in seen:
                    continue
                seen.add(made.node)
                yield Verdict(
                    sentence=f"the length of this schedule {what}",
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
