"""The training forward bypasses DistributedDataParallel.

What it finds
    A backward whose loss comes from `model.module(...)`, from a method of the wrapped model, or from the model as it
    was before the wrap, and from no forward through the DDP object. In a run: gradients that differ between ranks when
    the optimizer uses them, after a backward that no forward through the DDP object led to.

Why it is bad
    DDP prepares its reduction in its own forward. Without one the gradients of this backward stay on their rank: the
    ranks train models that drift apart. Nothing hangs and nothing fails.

Example
    model = DistributedDataParallel(net)
    loss = model.module(batch)              # or net(batch), or model.module.compute_loss(batch)
    loss.backward()

Remedy
    Call the wrapper: loss = model(batch). Where the loss needs another method, let forward call it, selected by an
    argument.

When it is wrong
    Where the gradients are averaged by hand in a way that was not recognised. model.module is right for state_dict,
    for attributes and under torch.no_grad().

References
    https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import AVERAGING, Check
from ddpdoctor.checks.gradients.missing_ddp_wrap import bypassing_forwards
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP207",
    name="forward-bypasses-ddp",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=AVERAGING,
    subjects=("wrap", "loss"),
    triggers=("DistributedDataParallel", "ccelerat", "Fabric", "auto_model"),
)
_REMEDY = "Call the DDP object itself; if another method than forward is needed, call it from forward."


def in_source(script: Script) -> Iterator[Finding]:
    """Report training forwards of a wrapped model that do not go through its wrapper."""
    yield from CHECK.suspected(bypassing_forwards(whole_projection(script)), _REMEDY)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report backwards past the wrapper whose gradients differ between the ranks when they are used."""
    from ddpdoctor.diagnosis.training.replicas import unaveraged

    for found in unaveraged(record):
        if found.why == "bypass":
            title = (
                f"the forward of this backward bypasses DistributedDataParallel: the gradients of {found.model} are "
                f"not averaged, and differ between ranks in {found.shown}"
            )
            yield from CHECK.judged(record.job.kind, (found.verdict(title, _REMEDY),))
