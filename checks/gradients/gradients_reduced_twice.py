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

import ast
from collections.abc import Iterator

from ddpdoctor.check import Check
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import NO_SYNC
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.wrapped_models import ddp_objects, innermost_loop, training_events, wrap_numbers
from ddpdoctor.source.script.script import Script

CHECK = Check(
    code="DDP222",
    name="gradients-reduced-twice",
    severity={"source": Severity.WARNING},
    subjects=("collectives",),
    triggers=("all_reduce",),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report all-reduces of ``.grad`` in the loop of a backward through DDP, for the parameters of a DDP object."""
    projection = whole_projection(script)
    backwards = [event for event in projection.in_course("backward") if _synchronises(event)]
    asked = [
        event for event in training_events(projection, "parameters", "named_parameters") if ddp_objects(event.receiver)
    ]
    seen: set[ast.AST] = set()
    for event in projection.in_course("collective") if backwards and asked else ():
        if event.name != "all_reduce" or event.node in seen or not _takes_gradient(event):
            continue
        around = [loop.node for loop in event.loops]
        before = [
            backward
            for backward in backwards
            if backward.ordinal < event.ordinal and innermost_loop(backward) in around
        ]
        if before and any(before[-1].ordinal < one.ordinal < event.ordinal for one in asked):
            seen.add(event.node)
            yield CHECK.finding(
                "source",
                "these gradients are reduced by hand, although backward through the DDP model has already averaged "
                "them",
                remedy="Remove this: DDP averages gradients during backward.",
                locations=event.location,
                because=(
                    ("this backward synchronises the gradients of the DDP model", before[-1].location),
                    ("this call chain leads to the reduction by hand", event),
                ),
            )


def _synchronises(backward: Event) -> bool:
    plain = not any(context.value == NO_SYNC for context in backward.contexts)
    return plain and bool(wrap_numbers(backward.receiver)) and innermost_loop(backward) is not None


def _takes_gradient(event: Event) -> bool:
    call = event.node
    if not isinstance(call, ast.Call):
        return False
    tensors = [*call.args[:1], *(entry.value for entry in call.keywords if entry.arg == "tensor")]
    return any(
        isinstance(node, ast.Attribute) and node.attr == "grad" for tensor in tensors for node in ast.walk(tensor)
    )
