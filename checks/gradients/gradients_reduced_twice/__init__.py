"""Gradients that DDP has averaged are all-reduced a second time.

What it finds
    An all_reduce of `.grad` in the step of a model that DistributedDataParallel wraps, after a backward that it
    synchronised.

Why it is bad
    backward has averaged the gradients already. Reducing them again by hand sends everything twice, one small
    collective for each parameter and none of it beside the computation; without a division by the number of ranks the
    gradients, and so the learning rate, are N times as large.

Example
    loss.backward()                         # model is a DDP object
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)

Remedy
    Leave the reduction by hand out. To reduce by hand, do not wrap the model, or run backward under model.no_sync().

When it is wrong
    Where the parameters are not among those that DDP wraps.

References
    https://docs.pytorch.org/docs/stable/notes/ddp.html
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check
from ddpdoctor.checks.gradients.gradients_reduced_twice.source import second_reductions
from ddpdoctor.finding import Fact, Finding, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

CHECK = Check(
    code="DDP222",
    name="gradients-reduced-twice",
    severity={"source": Severity.WARNING},
    subjects=("collectives",),
    triggers=("all_reduce",),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report reductions by hand of gradients that DDP reduces."""
    for second in second_reductions(whole_projection(script)):
        event, backward = second.event, second.backward
        yield CHECK.finding(
            "source",
            "these gradients are reduced by hand, although backward through the DDP model has already averaged them",
            remedy="Remove this: DDP averages gradients during backward.",
            locations=(event.module.location(event.node),),
            evidence=(
                Fact(
                    text="this backward synchronises the gradients of the DDP model",
                    basis="source",
                    location=backward.module.location(backward.node),
                ),
                Fact(
                    text="this call chain leads to the reduction by hand",
                    basis="source",
                    location=event.module.location(event.node),
                    stack=event.chain,
                ),
            ),
        )
