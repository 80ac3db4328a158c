"""What the expressions of a script come from: through variables, parameters and functions, by name."""

from __future__ import annotations

import ast
import sys
from collections.abc import Container, Iterator, Sequence
from typing import Any, Literal, TypeAlias

from ddpdoctor.source.script.module import Module, argument_of, descend, functions_named, last_name, parameters_of

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)
# Variables and parameters on the way back to where something is made.
_DEEPEST = 8
_MOST_ASKED = 5_000
"""Names that are looked up, of each question to a script; about half a second. What is behind them is not known."""
NAMED = (ast.Name, ast.Attribute)
"""Expressions that name a variable or an attribute."""

Bound: TypeAlias = "tuple[Literal['value', 'item', 'file'], Module, ast.expr]"
"""What a name is given: a value, an item of it, or the file that it opens."""


class Origins:
    """Follows the expressions of some modules back to where they come from."""

    def __init__(self, modules: Sequence[Module]) -> None:
        self.modules = modules
        self._left = _MOST_ASKED

    def results(self, module: Module, node: ast.Call) -> list[tuple[Module, ast.expr | None]]:
        """Return what the function of the modules returns that a call runs; nothing where it is not known."""
        return [
            (home, one.value)
            for home, function in self._called(module, node)
            for one in descend(function)
            if isinstance(one, ast.Return)
        ]

    def values(self, module: Module, node: ast.expr) -> list[ast.expr]:
        """Return what a variable is set to; of anything else the expression itself."""
        if not isinstance(node, NAMED):
            return [node]
        return [value for how, _, value in self.bindings(module, node) or () if how == "value"]

    def made(self, module: Module, node: ast.expr, depth: int = 0) -> list[ast.expr]:
        """Return the expressions that variables and parameters lead back to; nothing where one leads nowhere."""
        if not isinstance(node, NAMED) or depth > _DEEPEST:
            return [node]
        found = [self.made(home, one, depth + 1) for home, one in self.given(module, node)]
        return [one for each in found for one in each] if all(found) else []

    def given(self, module: Module, node: ast.expr) -> list[tuple[Module, ast.expr]]:
        """Return what a variable or attribute is set to; of a parameter, what the calls of its function give."""
        bound = self.bindings(module, node) if isinstance(node, NAMED) else None
        return [(home, value) for how, home, value in bound or () if how == "value"]

    def bindings(self, module: Module, node: ast.Name | ast.Attribute) -> list[Bound] | None:
        """Return all that a name is bound to; None where some of it is not known."""
        self._left -= 1
        if self._left < 0:
            return None
        if isinstance(node, ast.Attribute):
            return self._attribute(module, node)
        for around in module.ancestors(node):
            if isinstance(around, _COMPREHENSIONS):
                for generator in around.generators:
                    if node.id in _names(generator.target):
                        found = _item(module, node.id, generator.target, generator.iter)
                        return None if found is None else [found]
            if isinstance(around, _FUNCTIONS) or around is module.tree:
                bound = _bound_in(module, around, node.id)
                if bound is None:
                    return None
                if isinstance(around, _FUNCTIONS) and node.id in parameters_of(around):
                    handed = self._arguments(module, around, node.id)
                    return [*bound, *handed] if handed else None
                if bound:
                    return bound
        return self._of_module(module.resolve(node))

    def _attribute(self, module: Module, node: ast.Attribute) -> list[Bound] | None:
        if not isinstance(node.value, ast.Name) or node.value.id != "self":
            return self._of_module(module.resolve(node)) or self._of_any_class(node.attr)
        cls = next((one for one in module.ancestors(node) if isinstance(one, ast.ClassDef)), None)
        return None if cls is None else _assigned(module, cls, ast.unparse(node))

    def _of_any_class(self, attribute: str) -> list[Bound]:
        """Return what the classes of the script give an attribute that only the methods of one class set."""
        owners = [
            (module, cls)
            for module in self.modules
            for cls in module.index.of(ast.ClassDef)
            if _assigned(module, cls, f"self.{attribute}")
        ]
        return _assigned(*owners[0], f"self.{attribute}") if len(owners) == 1 else []

    def _of_module(self, name: str) -> list[Bound]:
        """Return what a module of the script sets the name to by which another one knows it."""
        owner, _, last = name.rpartition(".")
        home = next((one for one in self.modules if one.name == owner), None) if owner else None
        return [] if home is None else _bound_in(home, home.tree, last) or []

    def _arguments(self, module: Module, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> list[Bound]:
        owner = module.parents.get(function)
        called = owner.name if function.name == "__init__" and isinstance(owner, ast.ClassDef) else function.name
        return [("value", home, value) for home, _, value in given_for(self.modules, function, name, called)]

    def _called(self, module: Module, node: ast.Call) -> list[tuple[Module, ast.FunctionDef]]:
        """Return the function that a call runs by its name; of a module of torch, its ``forward``."""
        last = last_name(node.func)
        found = functions_named(self.modules, last)
        if isinstance(node.func, ast.Attribute) and not _is_of_script(module, node.func, found):
            return []  # A method of another object may have the name of one here: `model.parameters()`.
        if found or not isinstance(node.func, ast.Name):
            return found if len(found) == 1 else []
        made = self.values(module, node.func)
        names = {last_name(one.func) for value in made for one in descend(value) if isinstance(one, ast.Call)}
        inside = list(methods_of(self.modules, names, ("forward",)))
        return inside if len(inside) == 1 else []


def pairs_of(statement: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets of an assignment with their values, those of ``a, b = one, other`` each with its own."""
    for target in statement.targets:
        several = isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple)
        if several and len(target.elts) == len(statement.value.elts):  # type: ignore[attr-defined]
            yield from zip(target.elts, statement.value.elts, strict=True)  # type: ignore[attr-defined]
        else:
            yield target, statement.value


def given_for(
    modules: Sequence[Module], function: ast.FunctionDef | ast.AsyncFunctionDef, name: str, called: str = ""
) -> Iterator[tuple[Module, ast.Call, ast.expr]]:
    """Yield the calls of a function, by its name or what else it is ``called`` by, with what they give a parameter."""
    names = parameters_of(function)
    if name not in names:
        return
    position = names.index(name) - (names[0] in ("self", "cls"))
    for module in modules:
        for call in module.calls_by_name.get(called or function.name, ()):
            given = argument_of(call, name, position)
            if given is not None:
                yield module, call, given


def methods_of(
    modules: Sequence[Module], classes: Container[str], names: Container[str]
) -> Iterator[tuple[Module, ast.FunctionDef]]:
    """Yield the methods of some names of the classes of some names."""
    for module in modules:
        for cls in module.index.of(ast.ClassDef):
            if cls.name in classes:
                methods = (one for one in cls.body if isinstance(one, ast.FunctionDef))
                yield from ((module, one) for one in methods if one.name in names)


def _is_of_script(module: Module, called: ast.Attribute, found: list[tuple[Module, ast.FunctionDef]]) -> bool:
    """Return whether a call by an attribute runs a function of a module of the script, or a method of ``self``."""
    name = module.resolve(called)
    if any(name == f"{home.name}.{function.name}" for home, function in found):
        return True
    owners = {home.parents.get(function) for home, function in found}
    around = {one for one in module.ancestors(called) if isinstance(one, ast.ClassDef)}
    return isinstance(called.value, ast.Name) and called.value.id == "self" and not owners.isdisjoint(around)


def _names(target: ast.expr) -> list[str]:
    return [one.id for one in descend(target) if isinstance(one, ast.Name)]


def _bound_in(module: Module, body: ast.AST, name: str) -> list[Bound] | None:
    """Return what a function, or a module outside of its functions, binds a name to; None where not all is known."""
    found: list[Bound] = []
    for one in _of_body(module, body, (ast.For, ast.AsyncFor, ast.withitem, ast.Assign)):
        if isinstance(one, (ast.For, ast.AsyncFor)) and name in _names(one.target):
            item = _item(module, name, one.target, one.iter)
            if item is None:
                return None
            found.append(item)
        elif isinstance(one, ast.withitem) and isinstance(one.optional_vars, ast.Name) and one.optional_vars.id == name:
            if not isinstance(one.context_expr, ast.Call) or not opens_text(module, one.context_expr):
                return None
            found.append(("file", module, one.context_expr))
        elif isinstance(one, ast.Assign):
            unpacked = (target for target, _ in pairs_of(one) if isinstance(target, ast.Tuple))
            if any(name in _names(target) for target in unpacked):
                return None  # One of several that something is unpacked into which is not written out.
    return [*found, *_assigned(module, body, name)]


def _of_body(module: Module, body: ast.AST, kinds: tuple[type[ast.AST], ...]) -> Iterator[Any]:
    """Yield the nodes of some kinds in a function, or in a module outside of its functions."""
    if body is not module.tree:
        yield from (one for one in descend(body) if isinstance(one, kinds))
        return
    for kind in kinds:
        yield from (one for one in module.index.of(kind) if module.body_around(one) is body)


def _assigned(module: Module, body: ast.AST, name: str) -> list[Bound]:
    """Return what is assigned to a name, or to an attribute of ``self``, in some code."""
    return [
        ("value", module, value)
        for one in _of_body(module, body, _ASSIGNMENTS)
        for target, value in (pairs_of(one) if isinstance(one, ast.Assign) else [(one.target, one.value)])
        if value is not None and ast.unparse(target) == name
    ]


def _item(module: Module, name: str, target: ast.expr, iterable: ast.expr) -> Bound | None:
    """Return what the variable of a loop is an item of; None where it is one of several and not known."""
    if isinstance(target, ast.Name):
        return "item", module, iterable
    called = last_name(iterable.func) if isinstance(iterable, ast.Call) else ""
    elements = target.elts if isinstance(target, ast.Tuple) else []
    place = next((n for n, one in enumerate(elements) if isinstance(one, ast.Name) and one.id == name), -1)
    if not isinstance(iterable, ast.Call) or place < 0:
        return None
    if called == "enumerate" and place == 1 and iterable.args:
        return "item", module, iterable.args[0]
    if called == "items" and place == 0 and isinstance(iterable.func, ast.Attribute):
        return "item", module, iterable.func.value
    return ("item", module, iterable.args[place]) if called == "zip" and place < len(iterable.args) else None


def opens_text(module: Module, call: ast.Call) -> bool:
    """Return whether a call opens a file of text."""
    if last_name(call.func) != "open":
        return False
    given = [*call.args, *(word.value for word in call.keywords)]
    return not any(
        isinstance(one, ast.Constant) and isinstance(one.value, str) and "b" in one.value for one in given[1:]
    )


def computed_from(module: Module, body: ast.AST, node: ast.AST) -> set[ast.AST]:
    """Return the nodes of a body from which an expression is computed, the parts of what is unpacked as well."""
    found: set[ast.AST] = set(descend(node))
    assigned = list(module.index.within(body, ast.Assign))
    while True:
        names = {one.id for one in found if isinstance(one, ast.Name)}
        more = {
            inner
            for one in assigned
            if one.value not in found
            and any(isinstance(n, ast.Name) and n.id in names for target in one.targets for n in descend(target))
            for inner in descend(one.value)
        }
        if not more:
            return found
        found |= more


# Libraries whose functions compute on this rank alone.
_OF_ONE_RANK = frozenset({"torch", "numpy", "scipy", "pandas", "sklearn", "einops", "builtins"})


def may_be_agreed(modules: Sequence[Module], module: Module, node: ast.AST) -> bool:
    """Return whether ranks may agree on a value: by a library that is not read, or by torch.distributed."""
    own = {one.name.partition(".")[0] for one in modules}
    for call in computed_from(module, module.body_around(node), node):
        if not isinstance(call, ast.Call):
            continue
        full = module.resolve(call.func)
        root = full.partition(".")[0]
        name = last_name(call.func)
        asks = name.startswith(("get_", "is_", "init_"))
        if (full.startswith("torch.distributed") and not asks) or name in ("allreduce", "allgather"):
            return True
        if full and root not in own | _OF_ONE_RANK | sys.stdlib_module_names:
            return True
    return False


def gone_through(loop: ast.For, item: ast.expr) -> ast.expr | None:
    """Return what a loop goes over that gives an item of it, of what it goes through beside one another that part."""
    over, target = loop.iter, loop.target
    if isinstance(over, ast.Call) and last_name(over.func) in ("enumerate", "zip") and isinstance(target, ast.Tuple):
        beside = [over, *over.args] if last_name(over.func) == "enumerate" else over.args
        pairs = list(zip(target.elts, beside, strict=False))
    else:
        pairs = [(target, over)]
    wanted = ast.unparse(item)
    found = (part for one, part in pairs if wanted in {ast.unparse(inner) for inner in descend(one)})
    return next(found, None)
