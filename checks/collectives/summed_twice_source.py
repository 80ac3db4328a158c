"""A container that holds one tensor under several keys or places, whose items are summed over the ranks in place."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Verdict
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import External
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.divergence import function_around, nodes_of
from ddpdoctor.source.queries.origins import Origins, methods_of, pairs_of
from ddpdoctor.source.script.module import Module, descend, functions_named, last_name

REMEDY = (
    "Sum each tensor once: what stands under several keys or names may be one tensor, of which each needs a clone() "
    "of its own."
)
_VIEWS_OF = frozenset({"values", "items", "list", "tuple", "sorted", "enumerate", "keys"})
_DEEPEST = 4
_Place = tuple[Module, ast.AST, ast.expr]
"""An expression with its module and the function around it."""


def sums_of_one_tensor(projection: Projection) -> Iterator[Verdict]:
    """Yield sums of all items of a container of which two are one tensor."""
    finder, seen = _Finder(projection), set[ast.AST]()
    for event in projection.of_kind("collective"):
        if event.name not in ("all_reduce", "reduce") or event.node in seen or not _sums(event):
            continue
        seen.add(event.node)
        loop = _loop_of_items(event)
        held = None if loop is None else finder.held_twice(event.module, function_around(event.module, loop), loop.iter)
        if held is not None:
            module, one, other = held
            name = module.excerpt(one, 40)
            yield Verdict(
                sentence=f"`{name}` is in this container twice, and each of its items is summed over the ranks in "
                "place: it ends up as the sum times the number of ranks",
                remedy=REMEDY,
                locations=event.location,
                because=(
                    (f"`{name}` is put into it here", module.location(one)),
                    ("and the same tensor here", module.location(other)),
                ),
            )


def _sums(event: Event) -> bool:
    operation = event.argument("op", 1 if event.name == "all_reduce" else 2)
    return event.complete and (
        operation is None or (isinstance(operation, External) and operation.name.endswith(".SUM"))
    )


def _loop_of_items(event: Event) -> ast.For | None:
    """Return the loop each of whose turns sums its item, and does nothing else to it in place."""
    call, module = event.node, event.module
    statement = module.parents.get(call)
    loop = module.parents.get(statement) if isinstance(statement, ast.Expr) else None
    if not isinstance(loop, ast.For) or not isinstance(call, ast.Call) or not call.args:
        return None
    targets = {one.id for one in descend(loop.target) if isinstance(one, ast.Name)}
    container = next((one for one in descend(loop.iter) if isinstance(one, (ast.Name, ast.Attribute))), None)
    given = call.args[0]
    by_key = isinstance(given, ast.Subscript) and last_name(given.slice) in targets and container is not None
    if by_key and ast.unparse(given.value) != ast.unparse(container):  # type: ignore[attr-defined,arg-type]
        return None
    if not by_key and last_name(given) not in targets:
        return None
    inside = [node for part in loop.body for node in descend(part)]
    leaves = any(isinstance(node, (ast.Continue, ast.Break, ast.AugAssign)) for node in inside)
    changes = any(isinstance(one, ast.Call) and last_name(one.func).endswith("_") for one in inside)
    return None if leaves or changes else loop


class _Finder:
    def __init__(self, projection: Projection) -> None:
        self._modules = projection.machine.script.modules
        self._origins = Origins(self._modules)

    def held_twice(
        self, module: Module, body: ast.AST, node: ast.expr, depth: int = _DEEPEST
    ) -> tuple[Module, ast.expr, ast.expr] | None:
        """Return two places at which one tensor is put into a container."""
        if isinstance(node, ast.Call) and last_name(node.func) in _VIEWS_OF:
            inner = node.func.value if isinstance(node.func, ast.Attribute) else node.args[0] if node.args else None
            return None if inner is None else self.held_twice(module, body, inner, depth)
        if isinstance(node, (ast.List, ast.Tuple)):
            return self._alike(module, body, list(node.elts))
        if isinstance(node, ast.Dict):
            return self._alike(module, body, node.values)
        if not isinstance(node, (ast.Name, ast.Attribute)) or not depth:
            return None
        return self._of_variable(module, body, node, depth)

    def _of_variable(
        self, module: Module, body: ast.AST, node: ast.Name | ast.Attribute, depth: int
    ) -> tuple[Module, ast.expr, ast.expr] | None:
        text, by_key = ast.unparse(node), dict[str, list[ast.expr]]()
        for one in (one for one in nodes_of(body) if isinstance(one, ast.Assign)):
            for target, value in pairs_of(one):
                if isinstance(target, ast.Subscript) and ast.unparse(target.value) == text:
                    by_key.setdefault(ast.unparse(target.slice), []).append(value)
        stored = [values[0] for values in by_key.values() if len(values) == 1]
        if (found := self._alike(module, body, stored)) is not None:
            return found
        made = self._origins.given(module, node) if not stored else []
        places: list[_Place] = [(home, function_around(home, value), value) for home, value in made]
        if not places and isinstance(node, ast.Name):
            places = self._unpacked(module, body, node.id)
        found_in = (self.held_twice(*place, depth - 1) for place in places)
        return next((found for found in found_in if found is not None), None)

    def _alike(self, module: Module, body: ast.AST, values: list[ast.expr]) -> tuple[Module, ast.expr, ast.expr] | None:
        first: dict[tuple[ast.AST, int | str], ast.expr] = {}
        for value in values:
            tensor = self._tensor(module, body, value)
            if tensor is None:
                continue
            if tensor in first and not module.in_other_arms(first[tensor], value):
                return module, first[tensor], value
            first[tensor] = value
        return None

    def _tensor(self, module: Module, body: ast.AST, node: ast.expr) -> tuple[ast.AST, int | str] | None:
        """Return where the tensor is made that a variable holds, which is set once; None for what is made anew."""
        if not isinstance(node, ast.Name):
            return None
        setting = _setting(body, node.id)
        if setting is None or isinstance(setting.value, ast.Constant):
            return None
        if isinstance(setting.value, ast.Name):
            return self._tensor(module, body, setting.value)
        place = _place_in(setting, node.id)
        returned = self._returned(module, setting.value) if place >= 0 and isinstance(setting.value, ast.Call) else []
        if len(returned) == 1 and isinstance(whole := returned[0][2], ast.Tuple) and place < len(whole.elts):
            name = last_name(whole.elts[place])
            return (setting, name) if name and _setting(returned[0][1], name) is not None else None
        return setting, place

    def _unpacked(self, module: Module, body: ast.AST, name: str) -> list[_Place]:
        """Return what functions return at the place of a variable that what they return is unpacked into."""
        setting = _setting(body, name)
        if setting is None or not isinstance(setting.value, ast.Call):
            return []
        place, returned = _place_in(setting, name), self._returned(module, setting.value)
        return [
            (home, function, one.elts[place] if isinstance(one, ast.Tuple) and place < len(one.elts) else one)
            for home, function, one in returned
        ]

    def _returned(self, module: Module, call: ast.Call) -> list[_Place]:
        """Return what the function returns that a call runs: by its name, or the forward of the module that it is."""
        found: list[tuple[Module, ast.FunctionDef]] = functions_named(self._modules, last_name(call.func))
        if not found and isinstance(call.func, (ast.Name, ast.Attribute)):
            made = self._origins.made(module, call.func)
            names = {last_name(one.func) for value in made for one in descend(value) if isinstance(one, ast.Call)}
            found = list(methods_of(self._modules, names, ("forward",)))
        if len(found) != 1:
            return []
        home, function = found[0]
        return [(home, function, one.value) for one in nodes_of(function) if isinstance(one, ast.Return) and one.value]


def _setting(body: ast.AST, name: str) -> ast.Assign | None:
    """Return the assignment that alone binds a variable in a function."""
    names = (one for one in nodes_of(body) if isinstance(one, ast.Name) and one.id == name)
    stores = [one for one in names if isinstance(one.ctx, ast.Store)]
    assigned = (one for one in nodes_of(body) if isinstance(one, ast.Assign))
    setting = [one for one in assigned if any(part in stores for target in one.targets for part in ast.walk(target))]
    return setting[0] if len(stores) == len(setting) == 1 else None


def _place_in(assigned: ast.Assign, name: str) -> int:
    """Return the place of a variable among those that one value is unpacked into; -1 where it gets all of it."""
    for target, value in pairs_of(assigned):
        if isinstance(target, ast.Tuple) and value is assigned.value:
            return next((at for at, one in enumerate(target.elts) if last_name(one) == name), -1)
    return -1
