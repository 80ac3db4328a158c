"""Parameters are frozen, unfrozen or added after the DDP wrap.

What it finds
    After `DistributedDataParallel(model)` and before training: a changed `requires_grad` of its parameters, or a new
    layer set on the wrapped model. In a run: gradients of parameters that DDP did not list, different on each rank, or
    none for parameters that it waits for.

Why it is bad
    DDP collects the parameters that need a gradient once, in its constructor. One that is unfrozen or added later
    is not averaged: its values drift apart between ranks, silently. One that is frozen later is still waited for, and
    the next forward raises "Expected to have finished reduction in the prior iteration".

Example
    model = DistributedDataParallel(net)
    for parameter in model.module.backbone.parameters():
        parameter.requires_grad = True

Remedy
    Change the model first and wrap it last; to change it during training, wrap it again: DistributedDataParallel(net).

When it is wrong
    Where all parameters of a model are switched off and on again in turn, as GANs do; that is recognised when both
    switches are in the script.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import AVERAGING, Check
from ddpdoctor.checks.gradients.after_wrap_source import changes_after_wrap, unfreezing_callbacks, unfrozen_in_hooks
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP213",
    name="module-changed-after-wrap",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=AVERAGING,
    subjects=("wrap",),
    triggers=("DistributedDataParallel", "ccelerat", "Fabric", "auto_model", "Finetuning"),
)
REMEDY = "Change the model before the wrap, or wrap it again after the change."
_OF_FRAMEWORK = (
    "Let every parameter that is to learn want a gradient when the framework wraps the model, and hold it until then "
    "by a learning rate of 0 in a parameter group of its own, not by requires_grad."
)
"""Nobody wraps again what a framework has wrapped."""


def in_source(script: Script) -> Iterator[Finding]:
    """Report changes of a wrapped model's parameters."""
    for change in changes_after_wrap(whole_projection(script)):
        place = change.event.module.location(change.node)
        yield CHECK.finding(
            "source",
            f"{change.what} after the model was wrapped: DDP fixed the list of parameters that it averages when it "
            "was built",
            remedy=REMEDY,
            locations=place,
            because=((f"{change.what} here", place), ("the model is wrapped here", change.wrap.location)),
        )

    for event, fit in unfrozen_in_hooks(whole_projection(script)):
        yield CHECK.finding(
            "source",
            "parameters are unfrozen after the Trainer wrapped the module: DDP never lists them, and their gradients "
            "are not averaged",
            remedy=_OF_FRAMEWORK,
            locations=event.location,
            because=(("the module is wrapped here, while they are frozen", fit.location),),
        )
    for made, fit in unfreezing_callbacks(whole_projection(script)):
        place = made.location
        yield CHECK.finding(
            "source",
            f"{made.name.rpartition('.')[2]} unfreezes parameters after DDP took its list, and their gradients are "
            "never averaged",
            remedy=_OF_FRAMEWORK,
            locations=place,
            because=(("it freezes them before the module is wrapped, which happens here", fit.location),),
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report what came into a wrapped model and is not averaged, and what DDP waits for for nothing."""
    from ddpdoctor.checks.gradients.wraps_run import frozen_after_wrap
    from ddpdoctor.diagnosis.training.replicas import unaveraged

    basis = record.job.kind
    for found in unaveraged(record):
        if found.why == "unlisted":
            yield CHECK.finding(
                basis,
                f"{found.unequal:,} parameters of {found.model} were added or unfrozen after the wrap, and their "
                f"gradients are not averaged: {', '.join(found.names)}",
                remedy=_remedy(record, found.wrap),
                locations=found.wrap_location,
                evidence=found.facts(basis),
            )
    for frozen in frozen_after_wrap(record):
        yield CHECK.finding(
            basis,
            f"{frozen.parameters:,} parameters of {frozen.model} were frozen after the wrap, and DDP waits for their "
            f"gradients: {', '.join(frozen.names)}",
            remedy=REMEDY,
            locations=frozen.wrap_location,
            because=(("frozen before this forward", frozen.forward_location),),
        )


def _remedy(record: RunRecord, number: int) -> str:
    by_user = all(wrap.by_user for wrap in record.wraps if wrap.wrap == number)
    return REMEDY if by_user else _OF_FRAMEWORK
