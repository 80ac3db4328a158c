"""Gradients that DDP has averaged are all-reduced a second time.

What it finds
    An all_reduce of `.grad` in the step of a model that DistributedDataParallel wraps, after a backward that it
    synchronised; or of their norm, which is summed over the ranks and not divided.

Why it is bad
    backward has averaged the gradients already. Reducing them again by hand sends everything twice, one small
    collective for each parameter and none of it beside the computation; without a division by the number of ranks the
    gradients, and so the learning rate, are N times as large. Each rank has the norm of all gradients already: the sum
    of its squares makes it sqrt(N) times as large, so that clipping shrinks steps that needed none.

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

from ddpdoctor.check import Check, Script
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import NO_SYNC, NONE
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.wrapped_models import ddp_objects, innermost_loop, training_events, wrap_numbers
from ddpdoctor.source.script.module import descend, last_name, origins_of

# Functions and methods that make a norm of gradients, or a summand of one.
_NORMS = frozenset({"norm", "vector_norm", "square", "pow", "get_total_norm"})
CHECK = Check(
    code="DDP222",
    name="gradients-reduced-twice",
    severity={"source": Severity.WARNING},
    subjects=("collectives",),
    triggers=("all_reduce",),
)
_SAID = {
    False: (
        "these gradients are reduced by hand, although backward through the DDP model has already averaged them",
        "Remove this: DDP averages gradients during backward.",
    ),
    True: (
        "a norm of gradients is summed over the ranks, although backward through the DDP model gave each rank all of "
        "them, averaged: it comes out too large",
        "Remove this: after a backward through DDP the norm is the same on every rank.",
    ),
}


def in_source(script: Script) -> Iterator[Finding]:
    """Report all-reduces of ``.grad`` in the loop of a backward through DDP, for the parameters of a DDP object."""
    projection = whole_projection(script)
    backwards = [event for event in projection.in_course("backward") if wrap_numbers(event.receiver)]
    asked = list(training_events(projection, "parameters", "named_parameters"))
    seen: set[ast.AST] = set()
    for event in projection.in_course("collective") if backwards and asked else ():
        of_norm = not _takes_gradient(event) and _takes_norm(event)
        if event.name != "all_reduce" or event.node in seen or not (of_norm or _takes_gradient(event)):
            continue
        around = [loop.node for loop in event.loops]
        before = [
            backward
            for backward in backwards
            if backward.ordinal < event.ordinal and innermost_loop(backward) in around
        ]
        synchronised = before and _synchronises(before[-1])
        since = [one for one in asked if synchronised and before[-1].ordinal < one.ordinal < event.ordinal]
        if any(ddp_objects(one.receiver) for one in _gone_over(event, since) or since):
            seen.add(event.node)
            title, remedy = _SAID[of_norm]
            yield CHECK.finding(
                title,
                remedy=remedy,
                locations=event.location,
                because=(
                    ("this backward synchronises the gradients of the DDP model", before[-1].location),
                    ("this call chain leads to the reduction by hand", event),
                ),
            )


def _gone_over(event: Event, asked: list[Event]) -> list[Event]:
    """Return the parameters that the loops around a collective go over, where those are asked for in their heads."""
    heads = {node for loop in event.loops if isinstance(loop.node, ast.For) for node in ast.walk(loop.node.iter)}
    return [one for one in asked if one.node in heads][-1:]


def _synchronises(backward: Event) -> bool:
    return not any(context.value == NO_SYNC for context in backward.contexts) and innermost_loop(backward) is not None


def _takes_gradient(event: Event) -> bool:
    return any(map(_is_gradient, ast.walk(ast.Tuple(list(_tensors(event))))))


def _is_gradient(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "grad"


def _tensors(event: Event) -> Iterator[ast.expr]:
    if isinstance(event.node, ast.Call):
        yield from event.node.args[:1]
        yield from (entry.value for entry in event.node.keywords if entry.arg == "tensor")


def _takes_norm(event: Event) -> bool:
    """Return whether a norm of gradients is summed over all ranks, and no division makes a mean of the sum."""
    body = event.module.body_around(event.node)
    for tensor in _tensors(event):
        name, options = ast.unparse(tensor), [event.argument("op", 1), event.argument("group", 2)]
        told = [str(getattr(one, "name", "")) for one in options if one not in (None, NONE)]
        if not isinstance(tensor, ast.Name) or not all(one.endswith((".SUM", ".WORLD")) for one in told):
            return False  # A group of some ranks may hold parts of the gradients.
        inside = descend(body)
        added = [one.value for one in inside if isinstance(one, ast.AugAssign) and ast.unparse(one.target) == name]
        made = list(origins_of(ast.Tuple([tensor, *added]), body))
        words = {last_name(one.func) for one in made if isinstance(one, ast.Call)}
        powers = any(isinstance(one, ast.BinOp) and isinstance(one.op, ast.Pow) for one in made)
        return (
            (powers or bool(words & _NORMS))
            and any(map(_is_gradient, made))
            and not any(_divides(one, name) for one in inside)
        )
    return False


def _divides(node: ast.AST, name: str) -> bool:
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Div, ast.Mult)):
        return ast.unparse(node.left if isinstance(node, ast.BinOp) else node.target).startswith(name)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr.startswith(("div", "mul")) and ast.unparse(node.func.value) == name
    return False
