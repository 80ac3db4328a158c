"""A DataLoader gives every rank the same samples.

What it finds
    A map-style DataLoader that feeds the training forward of a DDP model, or of one that DeepSpeed's engine trains, and
    whose sampler does not divide the data set between the ranks; or a reader of the project itself that goes through
    the data by a position which does not depend on the rank. In a run the whole index lists of the ranks are
    compared, and the data behind equal indices. An IterableDataset of the project is told of where nothing in it
    depends on the rank.

Why it is bad
    Every rank trains on the whole data set: an epoch costs as many times the work as there are ranks, and the averaged
    gradient is that of nearly the same samples. Nothing fails, so it is noticed late or never.

Example
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    model = DistributedDataParallel(model)

Remedy
    loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset)), and sampler.set_epoch(epoch)
    before each epoch.

When it is wrong
    Where ranks are meant to see the same data (tensor parallelism). An iterable data set that shards itself, a data set
    that was split by rank and random batches seeded by rank are recognised.

References
    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import BoundHit, Check
from ddpdoctor.checks.data.missing_distributed_sampler.fix import divide
from ddpdoctor.checks.data.missing_distributed_sampler.own_reader import alike_readers, alike_streams
from ddpdoctor.checks.data.shared.batches import OF_TORCH, batches_remedy
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.fix.edits import Fix
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ExternalObject, constant
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.training_loops import by_engine, division, feedings, is_drawn
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP101",
    name="missing-distributed-sampler",
    severity={"source": Severity.WARNING, "rehearsal": Severity.ERROR, "run": Severity.ERROR},
    needs=frozenset({"loaders", "passes", "forwards"}),
    subjects=("training", "training-loader"),
    triggers=("DataLoader", "DistributedDataParallel", "ccelerat", "Fabric", "auto_model"),
)
_BY_DDP = ("a DDP model", "DistributedDataParallel")


def in_source(script: Script) -> Iterator[Finding]:
    """Report loaders that feed a backward of a DDP model and give every rank the whole data set."""
    projection = whole_projection(script)
    for feeding in feedings(projection):
        parts = [division(projection.machine, loader) for loader in feeding.alternatives]
        if not feeding.certain or any(part != "whole" for part in parts):
            continue
        loader, backward = feeding.loader, feeding.backward
        if is_drawn(projection.machine, loader):
            continue
        batches = loader.argument("batch_sampler", 4)
        own_batches = batches is not None and constant(batches) is not None
        made = batches.name if isinstance(batches, ExternalObject) else ""
        model, through = ("a model that DeepSpeed trains", "its engine") if by_engine(backward) else _BY_DDP
        yield CHECK.finding(
            "source",
            f"this DataLoader feeds the training of {model}, and no sampler divides its data set between the ranks",
            remedy=batches_remedy(made if made in OF_TORCH else "the batch sampler")
            if own_batches
            else "Give it sampler=DistributedSampler(dataset) instead of shuffle=True, and call "
            "sampler.set_epoch(epoch) before each epoch.",
            locations=(loader.module.location(loader.node),),
            evidence=(_reaches(backward, through),),
        )
    for feeding in alike_streams(projection):
        loader = feeding.loader
        yield CHECK.finding(
            "source",
            "every rank trains on the same items: nothing in this IterableDataset depends on the rank",
            remedy="Let __iter__ give each rank its own items, and as many as the others, as "
            "itertools.islice(items, rank, None, world_size) does.",
            locations=(loader.module.location(loader.node),),
            evidence=(_reaches(feeding.backward, "DistributedDataParallel"),),
        )
    for reader in alike_readers(projection):
        yield CHECK.finding(
            "source",
            f"every rank trains on the same batches: {reader.name} reads on from one position, whatever the rank",
            remedy="Let each rank begin at a position of its own, its rank times the size of a batch, and move on by "
            "the world size times that.",
            locations=(reader.module.location(reader.made),),
            evidence=(
                Fact(
                    text="this reads at the position and moves it on, and nothing in the class depends on the rank",
                    basis="source",
                    location=reader.class_module.head_location(reader.method),
                ),
                Fact(
                    text="its batches reach this forward of the DDP model",
                    basis="source",
                    location=reader.forward.module.location(reader.forward.node),
                ),
            ),
        )


def _reaches(backward: Event, through: str) -> Fact:
    return Fact(
        text=f"its batches reach this backward through {through}",
        basis="source",
        location=backward.module.location(backward.node),
    )


def fixes(script: Script, finding: Finding) -> Iterator[Fix]:
    """Offer a sampler that divides the data set."""
    for feeding in feedings(whole_projection(script)):
        if feeding.loader.module.location(feeding.loader.node) == finding.location:
            yield from divide(feeding, finding)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report loaders whose ranks draw the same samples; refute where they draw different ones."""
    from ddpdoctor.checks.data.shared.sharding_run import judge_sharding

    for sharding in judge_sharding(record):
        if sharding.duplicated:
            yield CHECK.finding(
                record.job.kind,
                sharding.sentence,
                remedy=sharding.remedy,
                locations=() if sharding.location is None else (sharding.location,),
                ranks=sharding.ranks,
                severity=sharding.severity,
                evidence=tuple(
                    Fact(
                        text=sentence,
                        basis=record.job.kind,
                        numbers=sharding.numbers if position == 0 else {},
                        location=sharding.location,
                    )
                    for position, sentence in enumerate(sharding.evidence)
                ),
            )
        elif sharding.duplicated is None:
            raise BoundHit(sharding.sentence)
        elif sharding.location is not None:
            yield Refuted(location=sharding.location, reason=sharding.sentence)
