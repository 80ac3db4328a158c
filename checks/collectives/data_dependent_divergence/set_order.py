"""Collectives in a loop over a set: every process goes through its strings, and its tensors, in an order of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ALL_LANES
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.sync_points import mentions
from ddpdoctor.source.script.module import Module
from ddpdoctor.source.script.syntax_index import descend

_SETS = frozenset({"set", "frozenset"})
_TENSORS = frozenset({"parameters", "buffers"})
"""Methods that give tensors, which are hashed by their addresses."""
_FIXES_ORDER = "PYTHONHASHSEED"


def collectives_in_set_order(projection: Projection) -> Iterator[tuple[Event, ast.For]]:
    """Collectives on what a loop over a set names, with that loop; each rank comes to another of them first."""
    if any(_FIXES_ORDER in module.text for module in projection.machine.script.modules):
        return
    seen: set[ast.AST] = set()
    for event in projection.of_kind("collective"):
        loop = event.loops[-1].node if event.loops else None
        if event.node in seen or event.ranks != ALL_LANES or not isinstance(loop, ast.For):
            continue
        names = [node.id for node in descend(loop.target) if isinstance(node, ast.Name)]
        arguments = event.node.args if isinstance(event.node, ast.Call) else []
        if any(mentions(argument, names) for argument in arguments) and _has_no_order(event.module, loop.iter):
            seen.add(event.node)
            yield event, loop


def _has_no_order(module: Module, node: ast.expr) -> bool:
    """Whether an expression is a set of several strings or of tensors, or a variable that is always such a set."""
    if isinstance(node, ast.Name):
        given = [assigned.value for assigned in module.index.of(ast.Assign) if _assigns(assigned, node.id)]
        stores = [name for name in module.index.of(ast.Name) if name.id == node.id and name.ctx.__class__ is ast.Store]
        return len(given) == len(stores) == 1 and not isinstance(given[0], ast.Name) and _has_no_order(module, given[0])
    if isinstance(node, ast.Set):
        return _are_strings(node.elts)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _SETS):
        return False
    (inner,) = node.args if len(node.args) == 1 else (node,)
    if isinstance(inner, (ast.List, ast.Tuple, ast.Set)):
        return _are_strings(inner.elts)
    return isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr in _TENSORS


def _assigns(statement: ast.Assign, name: str) -> bool:
    return [getattr(target, "id", "") for target in statement.targets] == [name]


def _are_strings(elements: list[ast.expr]) -> bool:
    """Whether several different texts are written out: numbers have the same order in every process."""
    texts = {element.value for element in elements if isinstance(element, ast.Constant)}
    return len(texts) > 1 and all(isinstance(text, str) for text in texts) and len(elements) >= len(texts)
