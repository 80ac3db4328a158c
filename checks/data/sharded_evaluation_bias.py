"""Evaluation is done by every rank over the whole data set.

What it finds
    A loop without gradients over a loader that no sampler divides, in which every rank of a DDP job runs the model. In
    a run: equal index lists over the whole data set, or results averaged over shards that a sampler padded.

Why it is bad
    Every rank computes the same result: the evaluation takes as long as on one GPU, however many there are, and each
    checkpoint waits for it. An average over padded shards counts the repeated samples twice.

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
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from ddpdoctor.check import Check
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.source.events import Event, LoopAround
from ddpdoctor.source.interpreter.values import ALL_RANKS
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.training_loops import (
    division,
    evaluating_forwards,
    feedings,
    is_averaged,
    only_loader,
)
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

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
    "padded": "All-reduce sums and counts instead of averages, and leave out the samples that the sampler repeats.",
}


def in_source(script: Script) -> Iterator[Finding]:
    """Report evaluation loops that repeat the same work on every rank."""
    for repeated in repeated_evaluations(whole_projection(script)):
        loop, loader = repeated.loop, repeated.loader
        yield CHECK.finding(
            "source",
            "every rank evaluates the whole data set and gets the same result",
            remedy=REMEDIES["repeated"],
            locations=loop.module.head_location(loop.node),
            because=(("no sampler divides this loader's data set between the ranks", loader.location),),
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report evaluation that is repeated or biased; refute where the ranks draw different samples."""
    from ddpdoctor.checks.data.samples_run import judge_evaluations

    yield from CHECK.judged(record.job.kind, judge_evaluations(record, REMEDIES))


# Evaluation that every rank does over the whole data set.


class RepeatedEvaluation(msgspec.Struct, frozen=True, eq=False):
    """A loop over a whole data set without gradients, on every rank."""

    forward: Event
    loop: LoopAround
    loader: Event


def repeated_evaluations(projection: Projection) -> Iterator[RepeatedEvaluation]:
    """Loops without gradients in which every rank runs the model over the same samples, each once."""
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
            yield RepeatedEvaluation(forward, loop, loader)


def _is_whole(projection: Projection, loop: LoopAround) -> bool:
    """Return whether a loop goes over the whole data set, this time: what is left by a divided one is done by all
    ranks.
    """
    loader = only_loader(projection, loop)
    return loader is not None and division(projection.machine, loader) == "whole"
