"""Collectives that write into a tensor that nothing looks at, made of a variable that is used afterwards."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import msgspec

from ddpdoctor.source.events import Event, Placed
from ddpdoctor.source.interpreter.values import is_varying, tags_of
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.divergence import function_around, nodes_of
from ddpdoctor.source.queries.origins import given_for
from ddpdoctor.source.queries.shown_numbers import call_chain
from ddpdoctor.source.ranks.rank_local_values import OWN_KINDS
from ddpdoctor.source.ranks.ranks import rank_names, size_names
from ddpdoctor.source.script.module import Module, all_once, descend, last_name

_OF_OBJECTS = "broadcast_object_list"
_IN_PLACE = frozenset({"all_reduce", "reduce", "broadcast", _OF_OBJECTS})
# Functions and methods of torch that make a new tensor of their argument or object: another `float()` may be the same.
_MAKES = frozenset({"tensor", "clone", "stack", "cat", "mean", "sum", "new_tensor", "full", "item", "float", "int"})
OF_FORM = frozenset({"shape", "size", "numel", "dim", "ndim", "dtype", "device", "element_size", "backward"})
"""Attributes that are there of a tensor before its numbers are."""


class LostResult(msgspec.Struct, frozen=True, eq=False):
    """What a collective has made of a variable, and that nothing gets."""

    collective: Event
    made: Placed
    """The expression that makes the tensor."""
    name: str
    use: Placed
    """Where the variable is used afterwards."""


@all_once
def lost_results(projection: Projection) -> Iterator[LostResult]:
    """Collectives in place whose tensor serves for nothing else, made of a rank's own number that is used after it."""
    others = rank_names(projection.machine.store) | size_names(projection.machine.store)
    seen: set[ast.AST] = set()
    for event in projection.in_course("collective"):
        if event.name not in _IN_PLACE or not event.positional or not isinstance(event.node, ast.Call):
            continue
        value = event.positional[0]
        if not is_varying(value) or OWN_KINDS.isdisjoint(kind for kind, _ in tags_of(value)):
            continue
        made = _made_for(projection, event)
        if made is None or made.node in seen:
            continue
        new = event.name == _OF_OBJECTS if isinstance(made.node, ast.List) else _is_new(made.node)
        parts = [made.node] if new and isinstance(made.node, ast.expr) else []
        for one in (one for part in parts for one in _variables_in(part)):
            use = None if last_name(one) in others else _used(projection, made, ast.unparse(one))
            if use is not None:
                seen.add(made.node)
                yield LostResult(event, made, ast.unparse(one), use)
                break


def _made_for(projection: Projection, event: Event) -> Placed | None:
    """Return the expression that makes what a collective writes, which nothing but functions that hand it on gets."""
    modules = projection.machine.script.modules
    places = list(call_chain(projection.machine.script, event))
    given = next(iter(event.node.args), None) if isinstance(event.node, ast.Call) else None
    for place, outer in zip(places, [*places[1:], None], strict=True):
        if not isinstance(place.module.parents.get(place.node), ast.Expr) or given is None:
            return None
        function = function_around(place.module, place.node)
        if not isinstance(given, ast.Name):
            return Placed(given, place.module)
        named = [one for one in nodes_of(function) if isinstance(one, ast.Name) and one.id == given.id]
        if any(one is not given and isinstance(one.ctx, ast.Load) for one in named):
            return None
        if len(named) > 1 and isinstance(function, ast.FunctionDef):
            assigned = place.module.assigned(function, given)
            return Placed(assigned[0], place.module) if len(assigned) == 1 == len(named) - 1 else None
        if outer is None or not isinstance(function, ast.FunctionDef):
            return None
        handed = given_for(modules, function, given.id)
        given = next((one for _, call, one in handed if call is outer.node), None)
    return None


def _is_new(node: ast.AST) -> bool:
    """Return whether an expression makes a tensor that shares its numbers with no other."""
    if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Compare)):
        return True
    if not isinstance(node, ast.Call):
        return False
    inside = node.func.value if isinstance(node.func, ast.Attribute) else next(iter(node.args), node.func)
    return last_name(node.func) in _MAKES or _is_new(inside)


def _variables_in(node: ast.expr) -> Iterator[ast.Name | ast.Attribute]:
    """Yield the variables that the numbers of an expression come from; not those of devices and settings."""
    if isinstance(node, ast.Call):
        own = isinstance(node.func, ast.Attribute) and not isinstance(node.func.value, ast.Name)
        made = isinstance(node.func, ast.Attribute) and (own or last_name(node.func) not in ("tensor", "stack", "cat"))
        for part in [node.func.value] if made else node.args[:1]:  # type: ignore[attr-defined]
            yield from _variables_in(part)
    elif isinstance(node, (ast.Name, ast.Attribute)):
        yield node
    elif isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Compare, ast.List, ast.Tuple)):
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                yield from _variables_in(part)


def _used(projection: Projection, made: Placed, name: str) -> Placed | None:
    """Return where a variable is looked at after a call, before it is set anew; an attribute in any method."""
    module = made.module
    for _, nodes in statements_after(module, made.node):
        same = [one for one in nodes if isinstance(one, (ast.Name, ast.Attribute)) and ast.unparse(one) == name]
        looked = [one for one in same if _is_looked_at(module, one)]
        if looked:
            return Placed(looked[0], module)
        if any(isinstance(one.ctx, ast.Store) for one in same):
            return None
    cls = next((one for one in module.ancestors(made.node) if isinstance(one, ast.ClassDef)), None)
    if cls is None or not name.startswith("self."):
        return None
    inside = set(descend(made.node))
    elsewhere = (
        one
        for one in module.index.within(cls, ast.Attribute)
        if ast.unparse(one) == name and one not in inside and _is_looked_at(module, one)
    )
    return next((Placed(one, module) for one in elsewhere), None)


def _is_looked_at(module: Module, node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Load) and getattr(module.parents[node], "attr", "") not in OF_FORM


def statements_after(module: Module, node: ast.AST) -> list[tuple[ast.stmt, list[ast.AST]]]:
    """Return the statements that run after a node in its function, in order, each with the nodes of its own."""
    function, first, last = function_around(module, node), getattr(node, "end_lineno", 0), len(module.lines)
    for inner in (node, *module.ancestors(node)):
        if inner is function:
            break
        blocks = (one for one in vars(module.parents[inner]).values() if isinstance(one, list) and inner in one)
        jumps = [one for one in next(blocks, []) if isinstance(one, (ast.Return, ast.Raise, ast.Break, ast.Continue))]
        # What stands behind such a one is on another path.
        last = min([last, *(one.end_lineno or 0 for one in jumps if one.lineno > first)])
    found: dict[ast.stmt, list[ast.AST]] = {}
    for one in nodes_of(function):
        if first < getattr(one, "lineno", 0) <= last and not module.in_other_arms(node, one):
            statement = next(up for up in (one, *module.ancestors(one)) if isinstance(up, ast.stmt))
            found.setdefault(statement, []).append(one)
    return sorted(found.items(), key=lambda entry: (entry[0].lineno, entry[0].col_offset))
