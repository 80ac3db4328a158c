"""Parameters that the forward of a wrapped model freezes, in its own code and in the methods that it calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from ddpdoctor.source.events import Event, Placed
from ddpdoctor.source.interpreter.attributes import class_attribute
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import Const, Function, Instance, constant
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.parameters import dead_code, modules_of
from ddpdoctor.source.script.module import argument_of, descend, dotted
from ddpdoctor.source.torch_model.recorded_calls import SET_REQUIRES_GRAD

DEEPEST = 3
"""Calls that are followed from a forward: it calls a method of its own or of a part, and that another one."""
_SWITCHES = (SET_REQUIRES_GRAD, "requires_grad_")


def frozen_in_forwards(projection: Projection) -> Iterator[tuple[Placed, Event]]:
    """Yield where a forward freezes a part that DDP listed as one that learns, with the wrap.

    Not where a line freezes something before the wrap: the forward may only do so again. Nor where the same is let
    learn again, or where parameters without a gradient are looked for.
    """
    machine = projection.machine
    before = [event.ordinal for event in projection.in_course("training", "call") if event.name in _SWITCHES]
    for wrap in projection.in_course("wrap"):
        searched = constant(wrap.named.get("find_unused_parameters", Const(False))) is not False
        if searched or not wrap.complete or any(ordinal < wrap.ordinal for ordinal in before):
            continue
        model = next(modules_of(machine, wrap), None)
        found = list(_switches(machine, model, "forward", DEEPEST)) if model is not None else []
        learning = {owner for _, owner, value in found if value}
        for place, owner, value in found:
            if not value and owner not in learning:
                yield place, wrap
                break


def _switches(machine: Machine, instance: Instance, name: str, depth: int) -> Iterator[tuple[Placed, str, bool]]:
    """Yield where a method switches parameters of its object, whose they are as it is written, and which way."""
    method = class_attribute(machine, instance.cls, name)
    module = machine.script.module(method.module) if isinstance(method, Function) else None
    if module is None or not isinstance(method, Function):
        return
    held, dead = _loops_over_parameters(method.node), dead_code(machine, instance)
    for node in descend(method.node):
        around = [node, *module.in_function(node)]
        if not dead.isdisjoint(around) or any(map(_is_for_evaluation, around, around[1:])):
            continue
        owner, value = _switched(node, held)
        if owner.startswith("self.") and value is not None:
            yield Placed(node, module), f"{instance.number}.{owner}", value
        elif isinstance(node, ast.Call) and depth and isinstance(node.func, ast.Attribute):
            target = dotted(node.func.value).split(".")
            part = machine.store.get(instance.number, target[1]) if len(target) == 2 and target[0] == "self" else None
            called = instance if target == ["self"] else part
            if isinstance(called, Instance) and not (called is instance and node.func.attr == name):
                yield from _switches(machine, called, node.func.attr, depth - 1)


def _loops_over_parameters(function: ast.AST) -> Mapping[str, str]:
    """Return the variables of loops over ``self.part.parameters()``, with that part."""
    found: dict[str, str] = {}
    for loop in (node for node in descend(function) if isinstance(node, ast.For)):
        called = loop.iter.func if isinstance(loop.iter, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in ("parameters", "named_parameters"):
            targets = (node.id for node in descend(loop.target) if isinstance(node, ast.Name))
            found.update(dict.fromkeys(targets, dotted(called.value)))
    return found


def _switched(node: ast.AST, held: Mapping[str, str]) -> tuple[str, bool | None]:
    """Return whose parameters a statement or a call switches, and whether they learn from then on."""
    if (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Attribute)
        and isinstance(node.value, ast.Constant)
    ):
        target = node.targets[0]
        if target.attr == "requires_grad" and isinstance(node.value.value, bool):
            return held.get(dotted(target.value), dotted(target.value)), node.value.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "requires_grad_":
        given = argument_of(node, "requires_grad", 0)
        named = True if given is None else given.value if isinstance(given, ast.Constant) else None
        owner = dotted(node.func.value)
        return held.get(owner, owner), named if isinstance(named, bool) else None
    return "", None


def _is_for_evaluation(inner: ast.AST, around: ast.AST) -> bool:
    """Return whether a part of a condition runs only while the model does not train: of ``if not self.training``."""
    if not isinstance(around, ast.If) or "training" not in (text := ast.unparse(around.test)):
        return False
    return ("not " in text) is (inner in around.body)
