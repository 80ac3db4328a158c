"""An attribute of the model is accessed on the DDP wrapper.

What it finds
    `model.name` on a DistributedDataParallel object, where the wrapped model's class defines `name` and DDP does not.

Why it is bad
    DDP does not forward attributes: AttributeError, often in the code at the end of an epoch, after hours of training.
    In a run on one process, without the wrap, the same line works.

Example
    model = DistributedDataParallel(Net())
    model.freeze_backbone()

Remedy
    Use the inner model: model.module.freeze_backbone(). For a training forward, call the wrapper instead.

When it is wrong
    If the wrapper's class forwards attributes by a __getattr__ set elsewhere.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.checks.gradients.module_changed_after_wrap import wrapper_attributes
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.projection import whole_projection

CHECK = Check(
    code="DDP215",
    name="wrapper-attribute-access",
    stands_for="wrapper-attribute",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=frozenset({"ranks"}),
    subjects=("wrap",),
    triggers=("DistributedDataParallel", "ccelerat", "Fabric", "auto_model"),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report attributes of the model that are asked of its wrapper."""
    yield from CHECK.suspected(wrapper_attributes(whole_projection(script)))


in_run = CHECK.judged_by("checks.gradients.steps_run", "wrapper_attributes")
