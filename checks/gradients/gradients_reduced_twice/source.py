"""Reductions by hand of gradients that DDP has reduced."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import msgspec

from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import NO_SYNC
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.wrapped_models import ddp_objects, innermost_loop, training_events, wrap_numbers


class SecondReduction(msgspec.Struct, frozen=True, eq=False):
    """An all-reduce of gradients after a backward that synchronised them."""

    event: Event
    backward: Event


def second_reductions(projection: Projection) -> Iterator[SecondReduction]:
    """All-reduces of ``.grad`` in the loop of a backward through DDP, for the parameters of a DDP object."""
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
            yield SecondReduction(event, before[-1])


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
