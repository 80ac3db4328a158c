"""A model is wrapped in DistributedDataParallel twice.

What it finds
    A DDP object that is given to DistributedDataParallel again, or a wrap that is repeated in a loop on its own result.

Why it is bad
    Both wrappers hook every parameter: all gradients are all-reduced twice, buffers are broadcast twice, and the memory
    for buckets is doubled. The names in the state dict get `module.` twice.

Example
    model = DistributedDataParallel(model)
    model = DistributedDataParallel(model, device_ids=[local_rank])

Remedy
    Wrap once.

When it is wrong
    No case is known.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.checks.gradients.module_changed_after_wrap import double_wraps
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.projection import whole_projection

CHECK = Check(
    code="DDP218",
    name="double-wrap",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"wraps"}),
    subjects=("wrap",),
    triggers=("DistributedDataParallel", "ccelerat", "Fabric", "auto_model"),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report wraps of what is wrapped already."""
    for wrap, first in double_wraps(whole_projection(script)):
        again = wrap is first
        yield CHECK.finding(
            "every iteration of this loop wraps the model again"
            if again
            else "this model is a DDP object already: every gradient is all-reduced twice",
            remedy="Wrap the model once" + (", before the loop." if again else "."),
            locations=wrap.location,
            because=() if again else ("the first wrap", first.location),
        )


in_run = CHECK.judged_by("checks.gradients.steps_run", "double_wraps", "Wrap the model once.")
