"""A model is changed, or wrapped again, after the DDP wrap.

What it finds
    After `DistributedDataParallel(model)` and before training: a changed `requires_grad` of its parameters, a new
    layer set on the wrapped model, or `convert_sync_batchnorm` on it. As a warning, a DDP object that is given to
    DistributedDataParallel again, or a wrap that a loop repeats on its own result. In a run: gradients of parameters
    that DDP did not list, different on each rank, or none for parameters that it waits for.

Why it is bad
    DDP collects the parameters that need a gradient once, in its constructor. One that is unfrozen or added later
    is not averaged: its values drift apart between ranks, silently. One that is frozen later is still waited for, and
    the next forward raises "Expected to have finished reduction in the prior iteration". SyncBatchNorm converted after
    the wrap may work, fail in the first forward, or leave layers unsynchronised that were captured before. Two wrappers
    hook every parameter: all gradients are all-reduced twice, buffers are broadcast twice, the memory for buckets is
    doubled, and the names in the state dict get `module.` twice.

Example
    model = DistributedDataParallel(net)
    for parameter in model.module.backbone.parameters():
        parameter.requires_grad = True

Remedy
    Change the model first and wrap it last; to change it during training, wrap it again: DistributedDataParallel(net).

When it is wrong
    Where all parameters of a model are switched off and on again in turn, as GANs do; that is recognised when both
    switches are in the script. Where a converted model is wrapped again.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check, TooLittleEvidence
from ddpdoctor.checks.gradients.after_wrap_source import (
    changes_after_wrap,
    double_wraps,
    late_conversions,
    unfreezing_callbacks,
)
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.record.streams.setup import AVERAGING
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP213",
    name="module-changed-after-wrap",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=AVERAGING,
    needs_live=frozenset({"wraps"}),
    subjects=("wrap",),
    triggers=("DistributedDataParallel", "ccelerat", "Fabric", "auto_model", "Finetuning", "convert_sync"),
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

    for wrap, first in double_wraps(whole_projection(script)):
        again = wrap is first
        yield CHECK.finding(
            "source",
            "every iteration of this loop wraps the model again"
            if again
            else "this model is a DDP object already: every gradient is all-reduced twice",
            remedy="Wrap the model once" + (", before the loop." if again else "."),
            severity=Severity.WARNING,
            locations=wrap.location,
            evidence=() if again else (Fact(text="the first wrap", basis="source", location=first.location),),
        )
    for conversion, wrap in late_conversions(whole_projection(script)):
        yield CHECK.finding(
            "source",
            "SyncBatchNorm is converted inside a model that DDP has already wrapped",
            remedy="Call convert_sync_batchnorm first, and wrap its result.",
            locations=conversion.location,
            because=(("the model is wrapped here", wrap.location),),
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report what came into a wrapped model and is not averaged, and what DDP waits for for nothing."""
    from ddpdoctor.checks.gradients.wraps_run import double_wraps as wraps_of_wraps
    from ddpdoctor.checks.gradients.wraps_run import frozen_after_wrap, late_batch_norms
    from ddpdoctor.diagnosis.training.replicas import unaveraged
    from ddpdoctor.diagnosis.wording import bytes_text

    basis = record.job.kind
    for twice in wraps_of_wraps(record):
        yield CHECK.finding(
            basis,
            "this model holds a DDP object already: "
            f"{bytes_text(twice.bytes_twice)} of gradients are all-reduced twice in every step",
            remedy="Wrap the model once.",
            severity=Severity.WARNING,
            locations=twice.location,
            evidence=(
                Fact(
                    text="the first wrap",
                    basis=basis,
                    numbers={"bytes_twice": twice.bytes_twice},
                    location=twice.inner_location,
                ),
            ),
        )
    if basis == "run":
        raise TooLittleEvidence("a live run records no change of a wrapped model")
    for late in late_batch_norms(record):
        yield CHECK.finding(
            basis,
            f"{late.layers} SyncBatchNorm layer{'s' if late.layers > 1 else ''} came into {late.model} after DDP had "
            "wrapped it",
            remedy="Call convert_sync_batchnorm first, and wrap its result.",
            locations=late.wrap_location,
            evidence=(
                Fact(
                    text="they are present in this forward",
                    basis=basis,
                    numbers={"layers": late.layers},
                    location=late.forward_location,
                ),
            ),
        )
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
