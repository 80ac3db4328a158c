"""Every rank splits the data set differently.

What it finds
    `random_split`, scikit-learn's `train_test_split`, or shuffled indices cut into parts, drawn on every rank without a
    seed, or with a seed that depends on the rank. In a run: the parts hold other indices on another rank. Also a list
    that every rank shuffles so before it takes its part by rank, as in files[rank::world_size]: a warning.

Why it is bad
    Each rank holds out different samples. What one rank validates on, the others train on: training data leaks into the
    validation, its result looks too good, and nothing fails. A DistributedSampler over such parts indexes a different
    list on every rank as well. Parts that ranks take of lists in different orders overlap: some samples are seen by
    several ranks in each epoch, and others by none.

Example
    train, val = random_split(dataset, [0.9, 0.1])

Remedy
    Give the split a generator with a fixed seed: generator=torch.Generator().manual_seed(0); or seed torch, numpy and
    random with the same number on every rank before it.

When it is wrong
    If unread code seeds the generators, or the samples of the ranks are disjoint before the split.

References
    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.random_split
    https://docs.pytorch.org/docs/stable/notes/randomness.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.checks.data.random_numbers_source import Draw, unshared_parts, unshared_splits
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP107",
    name="unseeded-random-split",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=frozenset({"loaders", "parts"}),
    subjects=("job",),
    triggers=("random_split", "train_test_split", "Subset", "DistributedSampler", "shuffle", "perm"),
)
REMEDY = (
    "Pass generator=torch.Generator().manual_seed(0) (random_state=0 for scikit-learn), or seed every rank with the "
    "same number before it."
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report random splits that differ between ranks, and lists in orders that do, of which ranks take parts."""
    projection = whole_projection(script)
    for draw in unshared_splits(projection):
        yield CHECK.finding(
            "source",
            f"every rank draws its own {_last(draw)}: what one rank holds out, other ranks train on",
            remedy=REMEDY,
            locations=draw.event.location,
            evidence=(_why_it_differs(draw),),
        )
    for draw in unshared_parts(projection):
        yield CHECK.finding(
            "source",
            f"every rank makes its own random order ({_last(draw)}) before it takes its part by rank: the parts "
            "overlap, and some samples are in none",
            remedy="Draw the same order on every rank, from a generator with a fixed seed (and the epoch added).",
            locations=draw.event.location,
            evidence=(_why_it_differs(draw),),
            severity=Severity.WARNING,
        )


def _last(draw: Draw) -> str:
    return draw.event.name.rpartition(".")[2]


def _why_it_differs(draw: Draw) -> Fact:
    event, seed = draw.event, draw.seed
    if seed is not None:
        location = seed.location
        return Fact(text="this seed depends on the rank", basis="source", location=location)
    return Fact(
        text="no earlier call gives the ranks a common seed, and each process starts with its own",
        basis="source",
        location=event.location,
        stack=event.chain,
    )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report splits whose parts differ between ranks; refute those that are the same, or of different data."""
    from ddpdoctor.checks.data.samples_run import judge_splits

    yield from CHECK.judged(record.job.kind, judge_splits(record), REMEDY)
