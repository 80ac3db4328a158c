"""Losses that a collective changes before their backward."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import msgspec

from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import tags_of
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.numbers import number_kind
from ddpdoctor.source.queries.sync_points import function_around, nodes_of, stores
from ddpdoctor.source.script.module import Module

_IN_PLACE = frozenset({"all_reduce", "reduce"})


class ReducedLoss(msgspec.Struct, frozen=True, eq=False):
    """A loss that is reduced in place and then differentiated."""

    name: str
    collective: Event
    backward: Event


def reduced_losses(projection: Projection) -> Iterator[ReducedLoss]:
    """Collectives that write a variable of which the same call of a function takes the backward afterwards."""
    backwards = list(projection.of_kind("backward"))
    seen: set[ast.AST] = set()
    for event in reductions(projection):
        name = argument_name(event)
        for backward in backwards:
            later = backward.ordinal > event.ordinal and backward.scopes == event.scopes
            if not later or event.node in seen:
                continue
            if _starts_from(backward.node, name):
                starts = not _assigned_between(event, backward, name)
            else:
                starts = _is_loss(projection, event, name) and _becomes(event, backward, name)
            if starts:
                seen.add(event.node)
                yield ReducedLoss(name, event, backward)


def _is_loss(projection: Projection, event: Event, name: str) -> bool:
    """Return whether what is reduced was computed by the model, or by a loss of torch: a count of samples was not."""
    if event.positional and any(kind == "ddp" for kind, _ in tags_of(event.positional[0])):
        return True
    modules, line = projection.machine.script.modules, getattr(event.node, "lineno", 0)
    function, node = function_around(event.module, event.node), ast.parse(name, mode="eval").body
    return number_kind(modules, event.module, function, node, line) == "mean"


def reductions(projection: Projection) -> Iterator[Event]:
    """Collectives that write the sum, or the like, of a variable of all ranks into that variable."""
    for event in projection.of_kind("collective"):
        if event.name in _IN_PLACE and argument_name(event):
            yield event


def argument_name(event: Event) -> str:
    """Return the variable or attribute that a collective is given; empty when it is given anything else."""
    named = [entry.value for entry in getattr(event.node, "keywords", []) if entry.arg == "tensor"]
    arguments = getattr(event.node, "args", []) or named
    if arguments and isinstance(arguments[0], (ast.Name, ast.Attribute)):
        return arguments[0].id if isinstance(arguments[0], ast.Name) else ast.unparse(arguments[0])
    return ""


def _starts_from(node: ast.AST, name: str) -> bool:
    """``name.backward()``, ``scaler.scale(name).backward()``, ``accelerator.backward(name)``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    receiver = node.func.value
    starts = [receiver, *node.args, *(receiver.args if isinstance(receiver, ast.Call) else ())]
    return any(isinstance(start, (ast.Name, ast.Attribute)) and ast.unparse(start) == name for start in starts)


def _becomes(event: Event, backward: Event, name: str) -> bool:
    """Return whether a backward starts from a sum or a quotient that the reduced loss was made part of."""
    first, last = getattr(event.node, "lineno", 0), getattr(backward.node, "lineno", 0)
    nodes = nodes_of(function_around(event.module, event.node))
    between = [node for node in nodes if isinstance(node, ast.Assign) and first < node.lineno < last]
    holding = {name}
    for node in sorted(between, key=lambda node: node.lineno):
        if _excludes(event.module, event.node, node):
            continue
        made = isinstance(node.value, ast.BinOp) and _computes_with(node.value, holding)
        for target in node.targets:
            (holding.add if made else holding.discard)(ast.unparse(target))
    return any(_starts_from(backward.node, one) for one in holding)


def _computes_with(node: ast.expr, names: set[str]) -> bool:
    """Return whether a variable is an operand, not merely an argument of a call, whose result may be cut off."""
    if isinstance(node, ast.BinOp):
        return _computes_with(node.left, names) or _computes_with(node.right, names)
    return isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in names


def _excludes(module: Module, one: ast.AST, other: ast.AST) -> bool:
    """Return whether two nodes are in different arms of an ``if``."""
    mine, others = _arms(module, one), _arms(module, other)
    return any(others[around] != arm for around, arm in mine.items() if around in others)


def _arms(module: Module, node: ast.AST) -> dict[ast.If, bool]:
    """Return the ``if`` statements around a node, with True where it is in the body and False where in the else."""
    arms: dict[ast.If, bool] = {}
    for around in module.ancestors(node):
        if isinstance(around, ast.If) and node is not around.test:
            arms[around] = node in around.body
        node = around
    return arms


def _assigned_between(event: Event, backward: Event, name: str) -> bool:
    first, last = getattr(event.node, "lineno", 0), getattr(backward.node, "lineno", 0)
    if first >= last:
        return True
    nodes = nodes_of(function_around(event.module, event.node))
    return any(stores(node, name) and first <= getattr(node, "lineno", 0) <= last for node in nodes)
