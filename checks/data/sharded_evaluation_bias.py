"""Evaluation is done by every rank over the whole data set.

What it finds
    A loop without gradients over a loader that no sampler divides, in which every rank of a DDP job runs the model. In
    a run: equal index lists over the whole data set, results averaged over shards that a sampler padded, or sums over
    the ranks with a count of all samples of such shards. As a warning: the results of a sampler's parts that are
    gathered, joined one after another and cut to the length of the data set.

Why it is bad
    Every rank computes the same result: the evaluation takes as long as on one GPU, however many there are, and each
    checkpoint waits for it. An average over padded shards counts the repeated samples twice. DistributedSampler deals
    the samples out in turns: joined one after another, results are compared with the targets of other samples, and the
    cut drops real ones and keeps those that were repeated.

Example
    with torch.no_grad():
        for batch in DataLoader(validation_set):        # on every rank
            correct += (model(batch).argmax(1) == batch.y).sum()

Remedy
    Divide the data set with DistributedSampler(shuffle=False), and all-reduce counts and sums, not averages. The
    sampler repeats some samples to give all ranks the same number; drop them where the exact number matters.

When it is wrong
    Where the evaluation is short, or every rank needs the exact result without communication.

References
    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
    https://github.com/mllam/neural-lam/issues/749
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Check
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.events import Event, LoopAround
from ddpdoctor.source.interpreter.values import ALL_RANKS, ExternalObject, tags_of
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.divergence import mentions
from ddpdoctor.source.queries.training_loops import (
    division,
    evaluating_forwards,
    feedings,
    is_averaged,
    only_loader,
)
from ddpdoctor.source.script.module import descend, last_name, made_from
from ddpdoctor.source.script.script import Script
from ddpdoctor.source.vocabulary import DISTRIBUTED_SAMPLER

CHECK = Check(
    code="DDP105",
    name="sharded-evaluation-bias",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ADVICE),
    needs=frozenset({"loaders", "passes", "forwards", "collectives"}),
    subjects=("training-loader",),
    triggers=("DistributedDataParallel", "DataLoader", "ccelerat", "Fabric", "auto_model"),
)
REMEDIES = {
    "repeated": "Divide it with DistributedSampler(shuffle=False) and all-reduce counts and sums.",
    "cut": "Put them in the order of the samples before the cut: torch.stack(parts, 1).flatten(0, 1), as the sampler "
    "deals them out.",
    "counted": "Sum over the first len(range(rank, len(dataset), world_size)) samples of the rank's part alone: what "
    "follows is what the sampler repeats.",
    "padded": "All-reduce sums and counts instead of averages, and leave out the samples that the sampler repeats.",
}


def in_source(script: Script) -> Iterator[Finding]:
    """Report evaluation loops that repeat the same work on every rank."""
    for loop, loader in repeated_evaluations(whole_projection(script)):
        yield CHECK.finding(
            "source",
            "every rank evaluates the whole data set and gets the same result",
            remedy=REMEDIES["repeated"],
            locations=loop.module.head_location(loop.node),
            because=(("no sampler divides this loader's data set between the ranks", loader.location),),
        )
    for gather, cut in cut_gathers(whole_projection(script)):
        yield CHECK.finding(
            "source",
            "the parts of all ranks, one after another, are not in the order of the samples: the cut keeps repeated "
            "ones and drops real ones",
            remedy=REMEDIES["cut"],
            locations=gather.module.location(cut),
            because=(
                (
                    "these are the results of each rank's part, which DistributedSampler deals out in turns",
                    gather.location,
                ),
            ),
            severity=Severity.WARNING,
        )


in_run = CHECK.judged_by("checks.data.samples_run", "judge_evaluations", "", REMEDIES)


# Evaluation that every rank does over the whole data set.


def repeated_evaluations(projection: Projection) -> Iterator[tuple[LoopAround, Event]]:
    """Loops without gradients in which every rank runs the model over the same samples, each once, with the loader."""
    training = {feeding.loader.ordinal for feeding in feedings(projection)}
    if not training and not any(is_averaged(projection, one) for one in projection.in_course("backward")):
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
            yield loop, loader


def _is_whole(projection: Projection, loop: LoopAround) -> bool:
    """Return whether a loop goes over the whole data set, this time: what is left by a divided one is done by all
    ranks.
    """
    loader = only_loader(projection, loop)
    return loader is not None and division(projection.machine, loader) == "whole"


# Parts of the ranks that are joined one after another and cut to the length of the data set.

_GATHERS = frozenset({"all_gather", "all_gather_object", "gather", "gather_object"})
_JOINS = frozenset({"cat", "concat", "concatenate", "sum", "chain", "from_iterable"})


def cut_gathers(projection: Projection) -> Iterator[tuple[Event, ast.Subscript]]:
    """Yield what gathers the results of parts that a DistributedSampler made, with the cut of what was joined of it."""
    for event in projection.in_course("collective"):
        arguments = event.node.args if isinstance(event.node, ast.Call) else []
        lists = [one.id for one in arguments[:2] if isinstance(one, ast.Name)]
        if event.name not in _GATHERS or not lists or not _is_dealt_out(projection, event):
            continue
        body = event.module.body_around(event.node)
        for cut in (one for one in descend(body) if isinstance(one, ast.Subscript)):
            if not isinstance(cut.slice, ast.Slice) or cut.slice.lower is not None or cut.slice.upper is None:
                continue
            length = made_from(cut.slice.upper, body)
            measured = any(isinstance(one, ast.Call) and last_name(one.func) == "len" for one in length)
            if measured and any(_joins(one, lists) for one in made_from(cut.value, body)):
                yield event, cut


def _is_dealt_out(projection: Projection, gather: Event) -> bool:
    """Return whether a rank gives, once, what it made of all batches that a DistributedSampler dealt out to it."""
    machine = projection.machine
    numbers = {number for value in gather.positional for kind, number in tags_of(value) if kind == "batch"}
    loaders = [machine.events[number] for number in numbers if number in machine.events]
    samplers = [loader.argument("sampler", 3) for loader in loaders]
    dealt = [one for one in samplers if isinstance(one, ExternalObject) and one.name == DISTRIBUTED_SAMPLER]
    repeats = any(only_loader(projection, loop) is not None for loop in gather.loops)
    return len(dealt) == len(loaders) == 1 and not repeats


def _joins(node: ast.AST, lists: list[str]) -> bool:
    """Return whether an expression puts the parts in some lists one after another."""
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)) and len(node.generators) == 2:
        first, second = node.generators
        in_parts = isinstance(first.iter, ast.Name) and first.iter.id in lists
        return in_parts and ast.unparse(second.iter) == ast.unparse(first.target)
    given = node.args if isinstance(node, ast.Call) and last_name(node.func) in _JOINS else []
    return any(isinstance(one, (ast.Starred, ast.Name)) for one in given) and mentions(given[0], lists)
