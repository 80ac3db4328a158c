"""The nodes of a syntax tree: those below a node, and an index of a whole tree by class."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)


class NodeIndex:
    """Every node of a tree, parents before children; operators and contexts (``Load``) are left out.

    All checks use the index instead of walking the tree: walking it once costs half of what parsing cost.
    """

    def __init__(self, tree: ast.AST) -> None:
        found: list[ast.AST] = [tree]
        places: dict[type[ast.AST], list[int]] = defaultdict(list)
        definitions = [-1]
        outer: dict[int, int] = {}
        parents: list[ast.AST] = []
        for position, node in enumerate(found):
            kind = node.__class__
            places[kind].append(position)
            fields = _FIELDS.get(kind)
            if not fields:
                if fields is None:
                    fields = _fields_of(kind)
                if not fields:
                    continue
            if kind in _DEFINITIONS:
                outer[position] = definitions[position]
                definitions[position] = position
            before = len(found)
            for name in fields:
                value = getattr(node, name, None)
                if value.__class__ is list:
                    found += [child for child in value if child is not None] if kind in _WITH_GAPS else value
                elif value is not None:
                    found.append(value)
            count = len(found) - before
            if count == 1:
                definitions.append(definitions[position])
                parents.append(node)
            elif count:
                definitions += [definitions[position]] * count
                parents += [node] * count
        self.nodes: Sequence[ast.AST] = found
        self.definitions: Sequence[int] = definitions
        """For every node the position in ``nodes`` of the function or class around it, or of itself; -1 for none."""
        self.outer_definitions: Mapping[int, int] = outer
        """For the position of every function and class that of the one around it; -1 for none."""
        self._places: Mapping[type[ast.AST], Sequence[int]] = dict(places)
        self._parents = parents

    def places(self, *kinds: type[ast.AST]) -> Sequence[int]:
        """Return the positions in ``nodes`` of the nodes of some classes, in order."""
        if len(kinds) == 1:
            return self._places.get(kinds[0], ())
        return sorted(place for kind in kinds for place in self._places.get(kind, ()))

    def of(self, kind: type[Node]) -> Sequence[Node]:
        """Return the nodes of one class, in order."""
        known = self._by_class.get(kind)
        if known is None:
            known = self._by_class[kind] = [self.nodes[place] for place in self._places.get(kind, ())]
        return known  # type: ignore[return-value]

    def within(self, around: ast.AST, kind: type[Node]) -> Sequence[Node]:
        """Return the nodes of one class, with places in the text, inside of a function, a statement or the module."""
        nodes = self.of(kind)
        if isinstance(around, ast.Module):
            return nodes
        start, end = _start(around), _end(around)
        return [node for node in nodes if start <= _start(node) and _end(node) <= end]

    @cached_property
    def _by_class(self) -> dict[type[ast.AST], list[ast.AST]]:
        return {}

    @cached_property
    def parents(self) -> Mapping[ast.AST, ast.AST]:
        """The parent of every node but the root."""
        return dict(zip(self.nodes[1:], self._parents, strict=True))


def _start(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.col_offset  # type: ignore[attr-defined]


def _end(node: ast.AST) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]


def children_of(node: ast.AST) -> list[ast.AST]:
    """Return the nodes directly below a node, operators and contexts left out."""
    kind = node.__class__
    fields = _FIELDS.get(kind)
    if fields is None:
        fields = _fields_of(kind)
    found: list[ast.AST] = []
    for name in fields:
        value = getattr(node, name, None)
        if value.__class__ is list:
            found += [child for child in value if child is not None] if kind in _WITH_GAPS else value
        elif value is not None:
            found.append(value)
    return found


def descend(node: ast.AST) -> list[ast.AST]:
    """Return a node and all below it, parents first; operators and contexts are left out."""
    found = [node]
    for inner in found:
        if inner.__class__ not in _LEAVES:
            found += children_of(inner)
    return found


def made_from(node: ast.AST, body: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of an expression, and of what the variables that it reads are assigned in the body around it."""
    assigned: dict[str, list[ast.expr]] = {}
    for inner in descend(body):
        if isinstance(inner, ast.Assign):
            for target in inner.targets:
                if isinstance(target, ast.Name):
                    assigned.setdefault(target.id, []).append(inner.value)
    pending: list[ast.AST] = [node]
    while pending:
        for inner in descend(pending.pop()):
            yield inner
            if isinstance(inner, ast.Name):
                pending += assigned.pop(inner.id, ())


_FILLS = frozenset({"add", "append", "extend", "insert", "update"})
"""Methods by which a list, a set or a dictionary takes something in."""


def origins_of(node: ast.AST, body: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of an expression, and of what the variables in it are assigned, run over, opened as, filled with
    or shuffled by.
    """
    bound: dict[str, list[ast.expr]] = {}
    for inner in descend(body):
        targets: list[tuple[ast.expr | None, ast.expr]] = []
        if isinstance(inner, ast.Assign):
            targets = [(target, inner.value) for target in inner.targets]
        elif isinstance(inner, (ast.For, ast.comprehension)):
            targets = [(inner.target, inner.iter)]
        elif isinstance(inner, ast.With):
            targets = [(item.optional_vars, item.context_expr) for item in inner.items]
        elif isinstance(inner, ast.Call) and last_name(inner.func) == "shuffle" and inner.args:
            targets = [(inner.args[0], inner)]
        elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr in _FILLS:
            targets = [(inner.func.value, given) for given in inner.args]
        for target, value in targets:
            if isinstance(target, ast.Name):
                bound.setdefault(target.id, []).append(value)
    pending = [node]
    while pending:
        for inner in descend(pending.pop()):
            yield inner
            if isinstance(inner, ast.Name):
                pending += bound.pop(inner.id, ())


def last_name(node: ast.AST) -> str:
    """Return the last name of what is called or taken from something: ``c`` in ``a.b().c``; empty when it has none."""
    kind = node.__class__
    if kind is ast.Attribute:
        return node.attr  # type: ignore[attr-defined,no-any-return]
    return node.id if kind is ast.Name else ""  # type: ignore[attr-defined]


_LEAVES = frozenset({ast.Name, ast.Constant, ast.alias, ast.Global, ast.Nonlocal, ast.Pass, ast.Break, ast.Continue})
_DEFINITIONS = frozenset({ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef})
_WITH_GAPS = frozenset({ast.Dict, ast.arguments})
"""Classes whose lists of nodes may hold None: ``{**other}``, and parameters without a default."""
_WITHOUT_NODES = frozenset(
    {"arg", "attr", "conversion", "ctx", "id", "is_async", "kind", "kwd_attrs", "lineno", "module", "level", "name"}
    | {"op", "ops", "rest", "simple", "str", "tag", "type_comment", "type_ignores"}
)
"""Fields that hold no nodes, or only operators and contexts."""
_EXCEPTIONS: Mapping[str, tuple[str, ...]] = {"MatchSingleton": (), "TypeAlias": ("name", "type_params", "value")}
"""Fields that hold nodes, of classes in which a field of the same name as in others holds something else."""
_FIELDS: dict[type[ast.AST], tuple[str, ...]] = dict.fromkeys(_LEAVES, ())
"""Fields that hold nodes, by the class of a node, filled as classes are met."""


def _fields_of(kind: type[ast.AST]) -> tuple[str, ...]:
    fields = _EXCEPTIONS.get(kind.__name__)
    if fields is None:
        fields = tuple(name for name in kind._fields if name not in _WITHOUT_NODES)
    _FIELDS[kind] = fields
    return fields
