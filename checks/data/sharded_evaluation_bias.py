"""Evaluation is done by every rank over the whole data set.

What it finds
    A loop without gradients over a loader that no sampler divides, in which every rank of a DDP job runs the model.

Why it is bad
    Every rank computes the same result: the evaluation takes as long as on one GPU, however many there are, and each
    checkpoint waits for it.

Example
    with torch.no_grad():
        for batch in DataLoader(validation_set):        # on every rank
            correct += (model(batch).argmax(1) == batch.y).sum()

Remedy
    Divide the data set with DistributedSampler(shuffle=False), and all-reduce counts and sums, not averages. The
    sampler repeats some samples to give all ranks as many; leave them out where the exact number matters.

When it is wrong
    Where the evaluation is short, or every rank needs the exact result without communication.

References
    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Severity
from ddpdoctor.source.evaluation import repeated_evaluations
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script import Script

CHECK = Check(code="DDP105", name="sharded-evaluation-bias", severity={"source": Severity.ADVICE})


def in_source(script: Script) -> Iterator[Finding]:
    """Report evaluation loops that repeat the same work on every rank."""
    for repeated in repeated_evaluations(whole_projection(script)):
        loop, loader = repeated.loop, repeated.loader
        yield CHECK.finding(
            "source",
            "every rank evaluates the whole data set, and all of them get the same result",
            remedy="Divide it with DistributedSampler(shuffle=False) and all-reduce counts and sums.",
            locations=(loop.module.head_location(loop.node),),
            evidence=(
                Fact(
                    text="no sampler divides this loader's data set between the ranks",
                    basis="source",
                    location=loader.module.location(loader.node),
                ),
            ),
        )
