"""Gradients are taken in a way that DDP's reduction does not see.

What it finds
    `torch.autograd.grad` for the parameters of a DDP model, and a second backward through one forward of it
    (`retain_graph=True`). In a run: such gradients that differ between ranks when the optimizer uses them; also
    those of the second of two backwards after two forwards, for DDP reduces once.

Why it is bad
    DDP averages what arrives in .grad during the first backward after its forward. autograd.grad returns gradients
    instead, and a second backward adds to .grad after the reduction is over: both stay different on every rank, and
    nothing says so.

Example
    loss = model(batch).mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))

Remedy
    Call loss.backward(), once for the sum of all losses of a forward; or all-reduce the gradients by hand.

When it is wrong
    If the result is only inspected. autograd.grad for inputs (gradient penalties) is not reported: it is right as
    long as the penalty is part of one loss that uses every parameter; a backward of the penalty alone leaves out the
    last bias, and DDP's reduction with it.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import AVERAGING, Check, RunRecord, Script
from ddpdoctor.checks.gradients.unreduced_gradients_source import unreduced_gradients
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection

CHECK = Check(
    code="DDP220",
    name="autograd-grad-bypass",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=AVERAGING,
    subjects=("training",),
    triggers=("autograd", "retain_graph"),
)
_SAID = {
    "autograd-grad": (
        "torch.autograd.grad returns this rank's gradients of {}: DDP does not average them",
        "Use loss.backward(), or all-reduce the gradients by hand.",
    ),
    "again": (
        "the gradients of this further backward of {} are not averaged: DDP had reduced already",
        "Add the losses and call backward once, or run each forward right before its own backward.",
    ),
}
"""Title and remedy by why gradients are not averaged."""


def in_source(script: Script) -> Iterator[Finding]:
    """Report gradients of a DDP model that are not averaged."""
    yield from CHECK.suspected(unreduced_gradients(whole_projection(script)))


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report gradients that came past DDP's reduction and differ between the ranks when they are used."""
    from ddpdoctor.diagnosis.training.replicas import unaveraged

    found = ((_SAID[one.why], one) for one in unaveraged(record) if one.why in _SAID)
    verdicts = (one.verdict(title.format(one.model), remedy) for (title, remedy), one in found)
    yield from CHECK.judged(record.job.kind, verdicts)
