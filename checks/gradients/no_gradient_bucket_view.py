"""Gradients are stored twice.

What it finds
    A DDP wrap without `gradient_as_bucket_view=True`, of a model whose gradients take at least 100 MB.

Why it is bad
    DDP copies each gradient into a bucket before it is all-reduced, and back. The buckets take as much memory as the
    gradients, and the copies take time.

Example
    model = DistributedDataParallel(large_model, device_ids=[local_rank])

Remedy
    Pass gradient_as_bucket_view=True: gradients are then views into the buckets, and the
    peak of memory is lower by their size.

When it is wrong
    Where .grad is detached in place (detach_()) or must not be a view.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.finding import Finding, Refuted, Severity

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP211",
    name="no-gradient-bucket-view",
    severity=dict.fromkeys(("rehearsal", "run"), Severity.ADVICE),
    needs=frozenset({"wraps"}),
)
WORTH_REPORTING_BYTES = 100_000_000
"""Bytes of gradients from which the second copy is worth a line."""


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the wraps whose buckets hold a second copy of large gradients."""
    from ddpdoctor.checks.gradients.wraps_run import gradient_copies

    for location, size in gradient_copies(record):
        if size >= WORTH_REPORTING_BYTES:
            yield CHECK.finding(
                record.job.kind,
                f"gradients are stored twice: {size / 1e6:,.0f} MB more than with gradient_as_bucket_view",
                remedy="Pass gradient_as_bucket_view=True to DistributedDataParallel.",
                locations=location,
                because=((f"DDP's buckets hold a copy of {size:,} bytes of gradients", None, {"bytes": size}),),
            )
        elif location is not None:
            amount = f"{size:,} bytes" if size else "no gradient"
            yield Refuted(location=location, reason=f"{amount} would be stored once instead of twice")
