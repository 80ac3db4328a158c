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

from ddpdoctor.check import Check
from ddpdoctor.finding import Severity

CHECK = Check(
    code="DDP211",
    name="no-gradient-bucket-view",
    severity=dict.fromkeys(("rehearsal", "run"), Severity.ADVICE),
    needs=frozenset({"wraps"}),
)
in_run = CHECK.judged_by(
    "checks.gradients.steps_run", "gradient_copies", "Pass gradient_as_bucket_view=True to DistributedDataParallel."
)
