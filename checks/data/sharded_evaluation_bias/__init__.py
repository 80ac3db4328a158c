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

from ddpdoctor.check import Check
from ddpdoctor.checks.data.sharded_evaluation_bias.source import repeated_evaluations
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
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
            locations=(loop.module.head_location(loop.node),),
            evidence=(
                Fact(
                    text="no sampler divides this loader's data set between the ranks",
                    basis="source",
                    location=loader.module.location(loader.node),
                ),
            ),
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report evaluation that is repeated or biased; refute where the ranks draw different samples."""
    from ddpdoctor.checks.data.sharded_evaluation_bias.run import judge_evaluations

    for evaluation in judge_evaluations(record):
        if evaluation.location is None:
            continue
        if evaluation.form == "divided":
            yield Refuted(location=evaluation.location, reason=evaluation.sentence)
            continue
        yield CHECK.finding(
            record.job.kind,
            evaluation.sentence,
            remedy=REMEDIES[evaluation.form],
            locations=(evaluation.location,),
            ranks=evaluation.ranks,
            evidence=(
                Fact(
                    text="the whole index lists of the ranks over this loader were compared",
                    basis=record.job.kind,
                    numbers=evaluation.numbers,
                    location=evaluation.loader_location,
                ),
            ),
        )
