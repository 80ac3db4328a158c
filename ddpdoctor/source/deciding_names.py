"""Names that decide, as far as one module's text says, whether a loop goes on or how a learning rate goes.

A function that no check would ask about matters after all when its result ends a loop: a rank may leave on its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.source.module import Module
from ddpdoctor.source.nodes import children_of, last_name

_Assignment = ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr
_NAMED = frozenset({ast.Name, ast.Attribute})
_AROUND_FUNCTIONS = frozenset({ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module, ast.Lambda})


def deciding_names(module: Module) -> frozenset[str]:
    """Last names of what conditions around ``break``, ``continue`` and ``return`` depend on, of ``while`` and steps.

    A name stands for everything that is called so in the module: variables, attributes, functions.
    """
    index = module.index
    waiting: list[str] = []
    leaving: list[ast.stmt] = [*index.of(ast.Break), *index.of(ast.Continue), *index.of(ast.Return)]
    for statement in leaving:
        for test in _tests_around(module, statement):
            waiting += _names(test)
    for while_ in index.of(ast.While):
        waiting += _names(while_.test)
    for call in index.of(ast.Call):
        if call.args and last_name(call.func) == "step":
            waiting += _names(call)
    if not waiting:
        return frozenset()
    sources = _sources(module)
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            for node in sources.get(name, ()):
                waiting += _names(node)
    return frozenset(found)


def _sources(module: Module) -> dict[str, list[ast.AST]]:
    """The expressions that what is called by a name depends on."""
    index = module.index
    found: dict[str, list[ast.AST]] = {}
    assignments: list[_Assignment] = [*index.of(ast.Assign), *index.of(ast.AugAssign)]
    assignments += [*index.of(ast.AnnAssign), *index.of(ast.NamedExpr)]
    for node in assignments:
        decided = _tests_around(module, node)
        if node.value is not None and node.value.__class__ is not ast.Constant:
            decided.append(node.value)
        if decided:
            for target in node.targets if isinstance(node, ast.Assign) else (node.target,):
                for name in _names(target):
                    found.setdefault(name, []).extend(decided)
    for call in index.of(ast.Call):
        if call.args and call.func.__class__ is ast.Attribute:
            for name in _names(call.func):
                found.setdefault(name, []).extend(call.args)
    for place in index.places(ast.Return):
        around = index.definitions[place]
        value = index.nodes[place].value  # type: ignore[attr-defined]
        if around >= 0 and value is not None:
            found.setdefault(index.nodes[around].name, []).append(value)  # type: ignore[attr-defined]
    return found


def _tests_around(module: Module, node: ast.AST) -> list[ast.AST]:
    """The conditions of the ``if`` statements around a statement, up to its function."""
    parents, found = module.index.parents, list[ast.AST]()
    around: ast.AST | None = parents.get(node)
    while around is not None and around.__class__ not in _AROUND_FUNCTIONS:
        if isinstance(around, ast.If):
            found.append(around.test)
        around = parents.get(around)
    return found


def _names(node: ast.AST) -> Iterator[str]:
    """The last names in an expression."""
    waiting: list[ast.AST] = [node]
    for inner in waiting:
        if inner.__class__ in _NAMED:
            yield last_name(inner)
        waiting.extend(children_of(inner))
