"""Ranks build different data sets, and one sampler divides them as if they were the same.

What it finds
    A DistributedSampler over a subset whose indices depend on the rank, over a data set whose constructor shuffles
    without a common seed, or over one of Hugging Face that each rank shuffles with a seed of its own; that, too, where
    an Accelerator divides the loader. In a run: data sets of different lengths, different subsets, or the same rows in
    different orders.

Why it is bad
    The sampler gives each rank its part of the *indices*, assuming that an index means the same sample everywhere.
    Over a subset that is already divided each rank sees a part of its part, and most samples are never used. Over data
    in a different order on each rank some samples are seen several times and others never.

Example
    part = Subset(dataset, range(rank, len(dataset), world_size))
    loader = DataLoader(part, sampler=DistributedSampler(part))

Remedy
    Divide once: either by rank and with shuffle=True, or the whole data set with the sampler. Seed the shuffle.

When it is wrong
    If the sampler is given a number of replicas other than the number of ranks; that is recognised.

References
    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.checks.data.rank_varying_dataset.source import rank_datasets
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP108",
    name="rank-varying-dataset",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"loaders", "passes", "parts", "holdings"}),
    subjects=("sampler",),
    triggers=("DistributedSampler", "ccelerat"),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report samplers over data sets that differ between ranks."""
    for found in rank_datasets(whole_projection(script)):
        sampler = found.sampler
        cause = found.dataset or (found.draw.event if found.draw is not None else sampler)
        divides = "sampler divides" if sampler.kind == "sampler" else "loader, which the Accelerator divides, is of"
        yield CHECK.finding(
            "source",
            "this sampler divides a subset that is already one rank's part"
            if found.draw is None and not found.reordered
            else f"this {divides} a data set whose order differs between ranks",
            remedy="Shuffle it with the same seed on every rank."
            if found.reordered
            else "Give the sampler the whole data set: it divides it in parts of one length."
            if found.draw is None
            else "Seed every rank with the same number before the data set is built.",
            locations=(sampler.module.location(sampler.node),),
            evidence=(
                Fact(
                    text="this depends on the rank" if found.draw is None else "no common seed fixes this",
                    basis="source",
                    location=cause.module.location(cause.node),
                ),
            ),
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report samplers over data sets that were seen to differ; refute where their samples are the same."""
    from ddpdoctor.checks.data.rank_varying_dataset.run import judge_rank_data

    for data in judge_rank_data(record):
        if not data.varies:
            for location in data.locations:
                yield Refuted(location=location, reason=data.sentence)
            continue
        place = data.locations[0] if data.locations else None
        yield CHECK.finding(
            record.job.kind,
            data.sentence,
            remedy=data.remedy,
            locations=data.locations,
            ranks=data.ranks,
            evidence=tuple(
                Fact(text=text, basis=record.job.kind, numbers={} if number else data.numbers, location=place)
                for number, text in enumerate(data.facts)
            ),
        )
