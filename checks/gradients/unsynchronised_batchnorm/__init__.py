"""BatchNorm sees only a small batch on each rank.

What it finds
    A DDP model with BatchNorm layers whose training loader gives each rank fewer than 16 samples, in a script without
    SyncBatchNorm.

Why it is bad
    Every rank normalises by the mean and variance of its own few samples. They are noisy, the running statistics that
    evaluation uses are those of rank 0, and accuracy falls below that of the same global batch on one GPU.

Example
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    model = DistributedDataParallel(ResNet())

Remedy
    Convert before the wrap: model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model). Or use GroupNorm.

When it is wrong
    Where the BatchNorm layers are frozen (eval mode), as in fine-tuned detectors. SyncBatchNorm costs two collectives a
    layer and step.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html
    https://arxiv.org/abs/1803.08494
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.checks.gradients.unsynchronised_batchnorm.source import small_batch_norms
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP205",
    name="unsynchronised-batchnorm",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ADVICE),
    needs=frozenset({"wraps", "forwards", "loaders"}),
    subjects=("model", "training-loader"),
    triggers=("BatchNorm",),
)
SMALL_BATCH = 16
"""Samples a rank below which statistics are noisy."""


def in_source(script: Script) -> Iterator[Finding]:
    """Report wraps of BatchNorm models that are fed small batches."""
    for small in small_batch_norms(whole_projection(script)):
        wrap, loader = small.wrap, small.loader
        yield CHECK.finding(
            "source",
            _title(small.layers, small.batch_size),
            remedy="Call SyncBatchNorm.convert_sync_batchnorm(model) before the wrap, or use GroupNorm.",
            locations=(wrap.module.location(wrap.node),),
            evidence=(
                Fact(
                    text=f"this loader gives each rank {small.batch_size} samples at a time",
                    basis="source",
                    numbers={"samples_per_rank": small.batch_size, "layers": small.layers},
                    location=loader.module.location(loader.node),
                ),
            ),
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the BatchNorm layers that train on small batches; refute it where they do not train, or on large ones."""
    from ddpdoctor.checks.gradients.shared.wrap_options_run import fed_batch_norms

    for fed in fed_batch_norms(record):
        if fed.layers and fed.batch_size < SMALL_BATCH:
            yield CHECK.finding(
                record.job.kind,
                _title(fed.layers, fed.batch_size),
                remedy="Call SyncBatchNorm.convert_sync_batchnorm(model) before the wrap, or use GroupNorm.",
                locations=() if fed.location is None else (fed.location,),
                evidence=(
                    Fact(
                        text=f"this loader gives each rank {fed.batch_size} samples at a time",
                        basis=record.job.kind,
                        numbers={"samples_per_rank": fed.batch_size, "layers": fed.layers},
                        location=fed.loader_location,
                    ),
                ),
            )
        elif fed.location is not None:
            reason = f"each rank trains on {fed.batch_size} samples" if fed.layers else "no BatchNorm layer is trained"
            yield Refuted(location=fed.location, reason=reason)


def _title(layers: int, samples: int) -> str:
    what = "1 BatchNorm layer normalises" if layers == 1 else f"{layers} BatchNorm layers normalise"
    return f"{what} over {samples} samples a rank"
