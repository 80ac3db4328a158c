"""Parameters are frozen, unfrozen or added after the DDP wrap.

What it finds
    After `DistributedDataParallel(model)` and before training: a changed `requires_grad` of its parameters, or a new
    layer set on the wrapped model.

Why it is bad
    DDP lists the parameters that need a gradient when it is built, and never again. One that is unfrozen or added later
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

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Severity
from ddpdoctor.source.after_wrap import changes_after_wrap
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script import Script

CHECK = Check(code="DDP213", name="module-changed-after-wrap", severity={"source": Severity.ERROR})


def in_source(script: Script) -> Iterator[Finding]:
    """Report changes of a wrapped model's parameters."""
    for change in changes_after_wrap(whole_projection(script)):
        yield CHECK.finding(
            "source",
            f"{change.what} after the model was wrapped: DDP listed what it averages when it was built",
            remedy="Change the model before the wrap, or wrap it again after the change.",
            locations=(change.event.module.location(change.node),),
            evidence=(
                Fact(
                    text="the model is wrapped here",
                    basis="source",
                    location=change.wrap.module.location(change.wrap.node),
                ),
            ),
        )
