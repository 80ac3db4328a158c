"""Whether two functions mean one file: a path as it is written, its variables as the calls that lead there give them.

``os.path.join(args.out, "best.pt")`` in a function that saves and in one that loads is one path where both get the same
``args``; what may have changed in between, or is made by a call of unknown outcome, is no certain path.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Container, Mapping
from functools import lru_cache

from ddpdoctor.source.events import Event
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.script.module import Module, argument_of, descend, last_name, parameters_of

_JOINS = frozenset({"join", "joinpath", "Path", "PurePath", "str", "format", "abspath", "expanduser", "realpath"})
"""What makes a path, or a text, of nothing but what it is given."""
_PLAIN = (ast.Constant, ast.JoinedStr, ast.FormattedValue, ast.BinOp, ast.Subscript, ast.Tuple, ast.operator)
MOST_FRAMES = 12


class _Uncertain(Exception):
    """A part of the path may be another one at another time."""


def spelled(projection: Projection, event: Event, path: ast.expr, frames: int = MOST_FRAMES) -> str:
    """Return the path that an event is given, written out over so many frames of its call chain; empty where it may not
    be the same at another time.
    """
    modules = {str(module.path): module for module in projection.machine.script.modules}
    module, function = event.module, event.module.body_around(event.node)
    written: ast.AST = copy.deepcopy(path)
    scopes = list(event.scopes)
    try:
        for frame in event.chain[1:frames]:
            scope = scopes.pop() if scopes else 0
            caller = modules.get(frame.file)
            call = None if caller is None else _call_at(caller, frame.line, function)
            given = {} if call is None else _given(call, function)
            written = _Writer(projection, module, function, scope, given.keys()).visit(written)
            if call is None or caller is None:
                return ast.unparse(written)
            written = _Filler(given).visit(written)
            module, function = caller, caller.body_around(call)
        scope = scopes.pop() if scopes else 0
        return ast.unparse(_Writer(projection, module, function, scope, ()).visit(written))
    except _Uncertain:
        return ""


def _call_at(module: Module, line: int, function: ast.AST) -> ast.Call | None:
    """Return the call of a function on a line; None where it is not the only one, or gives more than is written."""
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    calls = [one for one in module.calls_by_name.get(function.name, ()) if one.lineno <= line <= (one.end_lineno or 0)]
    plain = len(calls) == 1 and not any(isinstance(one, ast.Starred) for one in calls[0].args)
    return calls[0] if plain and all(word.arg for word in calls[0].keywords) else None


def _given(call: ast.Call, function: ast.AST) -> dict[str, ast.expr]:
    """Return what a call gives the parameters of a function; a default where it is a constant."""
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return {}
    names = parameters_of(function)
    plain = [*function.args.posonlyargs, *function.args.args]
    constants = dict(zip([one.arg for one in plain][::-1], function.args.defaults[::-1], strict=False))
    found: dict[str, ast.expr] = {}
    own = bool(names) and names[0] == "self" and isinstance(call.func, ast.Attribute)
    if own and isinstance(call.func, ast.Attribute):
        found["self"] = call.func.value
    for number, name in enumerate(names):
        value = argument_of(call, name, number - own) if name not in found else None
        default = constants.get(name)
        value = value if value is not None or not isinstance(default, ast.Constant) else default
        if value is not None:
            found[name] = value
    return found


class _Filler(ast.NodeTransformer):
    """Puts what a call gives in the place of parameters."""

    def __init__(self, given: Mapping[str, ast.expr]) -> None:
        self._given = given

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return copy.deepcopy(self._given[node.id]) if node.id in self._given else node


class _Writer(ast.NodeTransformer):
    """Writes out what a function has set once, and numbers every other variable by the call that it belongs to."""

    def __init__(
        self, projection: Projection, module: Module, function: ast.AST, scope: int, kept: Container[str]
    ) -> None:
        self._modules = projection.machine.script.modules
        self._module = module
        self._function = function
        self._scope = scope
        self._kept = kept
        """Parameters, which what a call gives them will stand for."""
        self._depth = 0

    def visit(self, node: ast.AST) -> ast.AST:
        if not isinstance(node, (ast.Name, ast.Attribute, ast.Call, *_PLAIN, ast.expr_context)):
            raise _Uncertain
        made: ast.AST = super().visit(node)
        return made

    def _of(self, node: ast.expr) -> ast.expr:
        made = self.visit(node)
        assert isinstance(made, ast.expr)
        return made

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if last_name(node.func) not in _JOINS:
            # What one call at one place has given, once: an object that is made where it is passed on.
            return ast.Name(f"{node.lineno}:{node.col_offset}@{self._scope}", ast.Load())
        if isinstance(node.func, ast.Attribute) and not self._module.resolve(node.func):
            node.func.value = self._of(node.func.value)
        node.args = [self._of(one) for one in node.args]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if sum(_attributes_set(module).count(node.attr) for module in self._modules) > 1:
            raise _Uncertain
        if not self._module.resolve(node):
            node.value = self._of(node.value)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        name = node.id
        if "@" in name or name in self._kept or self._module.resolve(node):
            return node
        times = _bound(self._function).count(name)
        if not times and len(self._module.assigned(self._module.tree, node)) < 2:
            return ast.Name(f"{self._module.name}@{name}", ast.Load())
        if times != 1:
            raise _Uncertain
        values = self._module.assigned(self._function, node)
        parameter = isinstance(self._function, ast.FunctionDef) and name in parameters_of(self._function)
        if not parameter and len(values) == 1 and self._depth < MOST_FRAMES:
            self._depth += 1
            try:
                return self._of(copy.deepcopy(values[0]))
            except _Uncertain:
                pass
            finally:
                self._depth -= 1
        elif not parameter:
            raise _Uncertain
        return ast.Name(f"{name}@{self._scope}", ast.Load())


@lru_cache(maxsize=64)
def _bound(function: ast.AST) -> list[str]:
    """Return the variables that a function binds, each as often as it does."""
    if isinstance(function, ast.Module):
        return []
    names = [one.id for one in descend(function) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
    return [*names, *(parameters_of(function) if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) else ())]


@lru_cache(maxsize=64)
def _attributes_set(module: Module) -> list[str]:
    """Return the attributes that a module sets, each as often as it does."""
    return [one.attr for one in module.index.of(ast.Attribute) if isinstance(one.ctx, ast.Store)]
