"""Training uses a number that each rank computed from its own part of the data.

What it finds
    Means, deviations, counts and weights of classes, running moments and losses that a rank makes of its own samples,
    before the training or from step to step, without reducing them over the ranks, and that reach the input of a DDP
    model, its loss, or what normalises the samples.

Why it is bad
    The ranks train different functions: the same sample is scaled or weighted in another way on each of them, and DDP
    averages the gradients as if it were not. Nothing fails; with more ranks the numbers are noisier and the result is
    worse, and what is saved has the numbers of one rank.

Example
    counts = torch.bincount(labels[rank::world_size])
    criterion = nn.CrossEntropyLoss(weight=1 / counts)

Remedy
    All-reduce the sums and the counts and divide afterwards, broadcast the number from one rank, or compute it from the
    whole data set on every rank.

When it is wrong
    If each rank is to have a number of its own, as where the ranks train on tasks of their own.

References
    https://github.com/leggedrobotics/rsl_rl/pull/226
    https://github.com/Denys88/rl_games/pull/363
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.events import Event, Statistic
from ddpdoctor.source.interpreter.attributes import class_attribute
from ddpdoctor.source.interpreter.values import ALL_RANKS, Function, Instance, Value, options_of
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.ranks.rank_local_values import statistics_in
from ddpdoctor.source.script.module import descend

CHECK = Check(
    code="DDP110",
    name="rank-local-statistic",
    severity={"source": Severity.WARNING},
    subjects=("training",),
    triggers=("DistributedDataParallel", "ccelerat", "Fabric"),
)
_REACHES = {"object": "this is made with it", "loader": "the samples of this loader are made with it"}
# Last part of the names of the transforms that are given a mean and a deviation.
_NORMALISES = "Normalize"


def in_source(script: Script) -> Iterator[Finding]:
    """Report numbers of a rank's own that training uses, once for each function that makes such."""
    projection = whole_projection(script)
    told: set[object] = set()
    for use, statistics in _uses(projection):
        place = use.module.location(use.node)
        bodies = dict.fromkeys(one.module.body_around(one.node) for one in statistics)
        for body in (one for one in bodies if one not in told):
            told.add(body)
            first, *others = (one for one in statistics if one.module.body_around(one.node) is body)
            yield CHECK.finding(
                f"`{first.module.excerpt(first.node, 60)}` is of the rank's own data, not reduced over the ranks, and "
                f"training uses it at line {place.line}: each rank trains another function",
                remedy="All-reduce the sums and counts that it is made of, broadcast it from one rank, or compute it "
                "from the whole data set.",
                locations=(first.location, place),
                because=(
                    (_REACHES.get(use.kind, "this reaches the input or the loss of the DDP model"), place),
                    *((f"`{one.module.excerpt(one.node, 60)}` as well", one.location) for one in others[:3]),
                ),
            )


def _uses(projection: Projection) -> Iterator[tuple[Event, list[Statistic]]]:
    """Yield what the training hands such numbers to, in the order of the script."""
    for event in projection.in_course("ddp-forward", "backward", "object", "loader"):
        if event.ranks != ALL_RANKS or not event.gradients or (event.kind == "object" and not _scales(event)):
            continue
        values: list[Value] = [*event.positional, *event.named.values()]
        if event.kind == "loader":
            values = list(_read_for_samples(projection, event.argument("dataset", 0)))
        if event.kind == "backward" and event.receiver is not None:
            values.append(event.receiver)
        found = {one.node: one for value in values for one in statistics_in(projection.machine, value, event)}
        if found:
            yield event, sorted(found.values(), key=lambda one: one.location)


def _read_for_samples(projection: Projection, dataset: Value | None) -> Iterator[Value]:
    """Yield the attributes of a data set of the project that it makes each sample with."""
    machine = projection.machine
    for made in options_of(dataset) if dataset is not None else ():
        method = class_attribute(machine, made.cls, "__getitem__") if isinstance(made, Instance) else None
        if isinstance(made, Instance) and isinstance(method, Function):
            read = {one.attr for one in descend(method.node) if isinstance(one, ast.Attribute)}
            kept = (machine.store.get(made.number, name) for name in machine.store.names(made.number) if name in read)
            yield from (value for value in kept if value is not None)


def _scales(event: Event) -> bool:
    """Return whether an object is a loss of torch, which may be given weights, or a transform that normalises."""
    last = event.name.rpartition(".")[2]
    return (event.name.startswith("torch.nn.") and last.endswith("Loss")) or last == _NORMALISES
