"""Losses that a collective changes: before their backward, or into a sum that is shown as a mean."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import msgspec

from ddpdoctor.source.meetings import function_around, mentions, nodes_of, stores
from ddpdoctor.source.nodes import descend, last_name
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.trace import Event
from ddpdoctor.source.values import External, constant

_IN_PLACE = frozenset({"all_reduce", "reduce"})
_MEANS = re.compile(r"loss|acc|mean|avg|average|err|top_?[15]$", re.IGNORECASE)
_SUMS = re.compile(r"total|sum|num|count|correct|size|^n_|_n$|seen", re.IGNORECASE)
_SHOWS = frozenset({"print", "info", "log", "add_scalar", "write", "debug", "set_postfix", "log_metric", "log_metrics"})
_TELLING = frozenset({ast.Assign, ast.AugAssign, ast.BinOp, ast.Call, ast.Return})
"""Classes of nodes that show a sum, make it a mean, or give it another name."""
_AVERAGES = frozenset({"div", "div_", "mul", "mul_", "mean", "true_divide", "divide", "divide_"})


class ReducedLoss(msgspec.Struct, frozen=True, eq=False):
    """A loss that is reduced in place and then differentiated."""

    name: str
    collective: Event
    backward: Event


class ShownSum(msgspec.Struct, frozen=True, eq=False):
    """A number that is summed over the ranks and shown without having been divided."""

    name: str
    collective: Event
    shown: ast.Call


def reduced_losses(projection: Projection) -> Iterator[ReducedLoss]:
    """Collectives that write a variable of which the same call of a function takes the backward afterwards."""
    backwards = list(projection.of_kind("backward"))
    seen: set[ast.AST] = set()
    for event in _reductions(projection):
        name = _argument_name(event)
        for backward in backwards:
            later = backward.ordinal > event.ordinal and backward.scopes == event.scopes
            if not later or event.node in seen or not _starts_from(backward.node, name):
                continue
            if not _assigned_between(event, backward, name):
                seen.add(event.node)
                yield ReducedLoss(name, event, backward)


def shown_sums(projection: Projection) -> Iterator[ShownSum]:
    """Sums over ranks of what is called a loss, an accuracy or a mean, shown in the same function and never divided."""
    seen: set[ast.AST] = set()
    for event in _reductions(projection):
        name = _argument_name(event)
        word = name.rpartition(".")[2]
        if event.node in seen or not _is_sum(event) or _SUMS.search(word):
            continue
        seen.add(event.node)
        nodes = [node for node in nodes_of(function_around(event.module, event.node)) if node.__class__ in _TELLING]
        calls = [node for node in nodes if isinstance(node, ast.Call) and _after(node, event) and _may_show(node)]
        names = _followers(nodes, name) if calls else set()
        if not calls or any(_averages(node, names) for node in nodes):
            continue
        calls = [node for node in calls if _shows(node, names)]
        shown = sorted(
            (call for call in calls if _MEANS.search(word) or _says_mean(call)), key=lambda call: call.lineno
        )
        if shown:
            yield ShownSum(name, event, shown[0])


def _reductions(projection: Projection) -> Iterator[Event]:
    for event in projection.of_kind("collective"):
        if event.name in _IN_PLACE and _argument_name(event):
            yield event


def _argument_name(event: Event) -> str:
    arguments = getattr(event.node, "args", [])
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


def _assigned_between(event: Event, backward: Event, name: str) -> bool:
    first, last = getattr(event.node, "lineno", 0), getattr(backward.node, "lineno", 0)
    if first >= last:
        return True
    nodes = nodes_of(function_around(event.module, event.node))
    return any(stores(node, name) and first <= getattr(node, "lineno", 0) <= last for node in nodes)


def _is_sum(event: Event) -> bool:
    operation = event.argument("op", 1 if event.name == "all_reduce" else 2)
    if operation is None:
        return event.complete
    return isinstance(operation, External) and operation.name.endswith(".SUM") and constant(operation) is ...


def _followers(nodes: list[ast.AST], name: str) -> set[str]:
    """A variable and those that are assigned from it."""
    names = {name}
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    for _ in range(3):
        for node in assignments:
            if mentions(node.value, names):
                targets = [target for target in node.targets if isinstance(target, (ast.Name, ast.Attribute))]
                names.update(ast.unparse(target) for target in targets)
    return names


def _averages(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mult)):
        return mentions(node, names)
    if isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mult)):
        return mentions(node.target, names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _AVERAGES:
        return mentions(node, names)
    return isinstance(node, ast.Return) and node.value is not None and mentions(node.value, names)


def _shows(node: ast.Call, names: set[str]) -> bool:
    inside = [*node.args, *(keyword.value for keyword in node.keywords)]
    return any(mentions(part, names) for part in inside)


def _may_show(node: ast.Call) -> bool:
    return last_name(node.func) in _SHOWS


def _says_mean(call: ast.Call) -> bool:
    """Whether what is shown is called a loss, an accuracy or a mean, and no sum, by a text beside it."""
    texts = [node.value for part in call.args for node in descend(part) if isinstance(node, ast.Constant)]
    words = " ".join(text for text in texts if isinstance(text, str))
    return _MEANS.search(words) is not None and not _SUMS.search(words)


def _after(node: ast.Call, event: Event) -> bool:
    return node.lineno > getattr(event.node, "lineno", 0)
