"""SyncBatchNorm is converted after the DDP wrap.

What it finds
    `convert_sync_batchnorm` on a DDP object, or on the model inside of one, after the wrap.

Why it is bad
    The conversion replaces the BatchNorm layers inside a model whose parameters, buffers and hooks DDP has already
    registered. torch asks for the conversion before the wrap; what happens otherwise depends on the version: it may
    work, fail in the first forward, or leave layers unsynchronised that were captured before.

Example
    model = DistributedDataParallel(model)
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)

Remedy
    Convert first, then wrap.

When it is wrong
    Where the converted model is wrapped again.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.checks.gradients.module_changed_after_wrap import late_conversions
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.projection import whole_projection

CHECK = Check(
    code="DDP219",
    name="syncbn-after-wrap",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=frozenset({"wraps", "wrap_changes"}),
    subjects=("wrap",),
    triggers=("convert_sync",),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report conversions to SyncBatchNorm that come too late."""
    for conversion, wrap in late_conversions(whole_projection(script)):
        yield CHECK.finding(
            "SyncBatchNorm is converted inside a model that DDP has already wrapped",
            remedy="Call convert_sync_batchnorm first, and wrap its result.",
            locations=conversion.location,
            because=("the model is wrapped here", wrap.location),
        )


in_run = CHECK.judged_by(
    "checks.gradients.steps_run", "late_batch_norms", "Call convert_sync_batchnorm first, and wrap its result."
)
