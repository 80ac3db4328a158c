"""All ranks draw the same random numbers for their augmentation.

What it finds
    A seed that is the same on every rank, never followed by one that depends on the rank, and a data set whose
    `__getitem__`, or a transform of torchvision that it holds, draws from that generator. In a run: a
    generator in the same state on all ranks when the first training batch was fetched, and moved by the fetch.

Why it is bad
    The ranks draw the same crops, flips and noise in the same order: the n-th sample of every rank is augmented in the
    same way, so the global batch has less variety than it seems to have.

Example
    torch.manual_seed(0)                                # on every rank
    def __getitem__(self, index):
        return self.images[index] + torch.randn(3, 32, 32)

Remedy
    Keep the common seed for what has to agree (splits, synthetic data), then seed by rank before training:
    torch.manual_seed(seed + rank).

When it is wrong
    If ranks should augment identically. A common seed for initialisation alone is fine and is not reported.

References
    https://docs.pytorch.org/docs/stable/notes/randomness.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.checks.data.identical_random_seed.source import shared_augmentations
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP104",
    name="identical-random-seed",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ADVICE),
    needs=frozenset({"loaders", "forwards", "random_states", "seedings"}),
    subjects=("training",),
    triggers=("seed",),
)
REMEDY = "Seed by rank before training: torch.manual_seed(seed + rank), and so for numpy and random."


def in_source(script: Script) -> Iterator[Finding]:
    """Report common seeds from which augmentation draws."""
    for shared in shared_augmentations(whole_projection(script)):
        seed = shared.seed
        yield CHECK.finding(
            "source",
            "every rank has this seed, and the data set's items draw from it: all ranks apply the same augmentation",
            remedy=REMEDY,
            locations=(seed.module.location(seed.node),),
            evidence=(Fact(text=f"a draw from {shared.library} per item", basis="source", location=shared.draw),),
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report generators that are alike on all ranks when training begins; refute where they differ."""
    from ddpdoctor.checks.data.identical_random_seed.run import judge_randomness

    for verdict in judge_randomness(record):
        if not verdict.shared:
            for location in verdict.locations:
                yield Refuted(location=location, reason=verdict.sentence)
            continue
        draw = () if verdict.draw is None else (verdict.draw,)
        yield CHECK.finding(
            record.job.kind,
            verdict.sentence,
            remedy=REMEDY,
            locations=(*verdict.locations, *draw),
            ranks=verdict.ranks,
            evidence=(Fact(text="fetching the batch drew from it here", basis=record.job.kind, location=verdict.draw),),
        )
