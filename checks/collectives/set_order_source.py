"""What follows the order of a set, which is another one in every process: collectives, and the parts of models."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ALL_RANKS, Instance
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.divergence import mentions
from ddpdoctor.source.script.module import Module, descend, last_name, made_from
from ddpdoctor.source.script.script import uses_any
from ddpdoctor.source.torch_model.buffers import parts_of_module

_SETS = frozenset({"set", "frozenset"})
# Methods that give tensors, which are hashed by their addresses.
_TENSORS = frozenset({"parameters", "buffers"})
# Methods of a set that give another set, whose order is as little fixed.
_OF_SETS = frozenset({"union", "intersection", "difference", "symmetric_difference"})
# Functions and methods that give what they are given, or a view of it, in the same order.
_KEEPS_ORDER = frozenset({"list", "tuple", "enumerate", "iter", "reversed", "dict", "keys", "values", "items", "copy"})
# Functions that put tensors or numbers one after another.
_PACKS = frozenset({"stack", "cat", "concatenate", "tensor", "as_tensor", "array", "FloatTensor", "Tensor"})
_FIXES_ORDER = "PYTHONHASHSEED"
# Methods and functions that give a module a part, a parameter or a buffer by its name.
_REGISTERS = frozenset({"register_buffer", "register_parameter", "register_module", "add_module", "setattr"})
# Modules that hold others by their names, in the order of the names.
_KEYED = frozenset({"ModuleDict", "ParameterDict"})
# Variables, parameters and functions between a set and what is made of it.
_DEEPEST = 8
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NAMED = (ast.Name, ast.Attribute)


_InOrder = tuple[Event, Module, ast.expr]
"""What follows the order of a set, and that order with its module."""


def collectives_in_set_order(projection: Projection) -> Iterator[_InOrder]:
    """Yield collectives on what a loop over a set names, or on what was put together in its order; with that order."""
    if uses_any(projection.machine.script, (_FIXES_ORDER,)):
        return
    seen: set[ast.AST] = set()
    for event in projection.of_kind("collective"):
        if event.node in seen or event.ranks != ALL_RANKS or not isinstance(event.node, ast.Call):
            continue
        if not event.loops and not event.node.args:
            continue
        loop = event.loops[-1].node if event.loops else None
        order = _order_of_loop(event, event.node, loop) if isinstance(loop, ast.For) else None
        order = order or _order_of_parts(event.module, event.node)
        if order is not None:
            seen.add(event.node)
            yield event, event.module, order


def models_in_set_order(projection: Projection) -> Iterator[_InOrder]:
    """Yield wraps of models whose parts or buffers were registered in a set's order: DDP pairs them by position."""
    script = projection.machine.script
    if uses_any(script, (_FIXES_ORDER,)):
        return
    for wrap in projection.of_kind("wrap"):
        wrapped = wrap.argument("module", 0)
        parts = () if wrapped is None else parts_of_module(projection.machine, wrapped, registered=True)
        for cls in dict.fromkeys(part.cls for part in parts if isinstance(part, Instance)):
            module = script.module(cls.module)
            for node in descend(cls.node) if module is not None else ():
                order = _order_of_registration(module, node) if module is not None else None
                if module is not None and order is not None and _has_no_order(module, order):
                    yield wrap, module, order


def _order_of_registration(module: Module, node: ast.AST) -> ast.expr | None:
    """Return what a loop goes over that registers something in each turn, or a dict of modules is made of."""
    if isinstance(node, ast.For):
        names = targets_of(node)
        registers = any(
            (isinstance(one, ast.Call) and last_name(one.func) in _REGISTERS and mentions(one, names))
            or (isinstance(one, ast.Assign) and any(_is_part(module, target, names) for target in one.targets))
            for one in descend(node)
        )
        return node.iter if registers else None
    if isinstance(node, ast.Call) and last_name(node.func) in _KEYED and node.args:
        items = node.args[0]
        return items.generators[0].iter if isinstance(items, ast.DictComp) else items
    return None


def _is_part(module: Module, target: ast.expr, names: list[str]) -> bool:
    if not isinstance(target, ast.Subscript) or not isinstance(target.value, _NAMED) or not mentions(target, names):
        return False
    return any(isinstance(one, ast.Call) and last_name(one.func) in _KEYED for one in _given(module, target.value))


def targets_of(loop: ast.For) -> list[str]:
    """Return the variables that a loop gives its items to."""
    return [node.id for node in descend(loop.target) if isinstance(node, ast.Name)]


def _order_of_loop(event: Event, call: ast.Call, loop: ast.For) -> ast.expr | None:
    """Return the set that a loop goes over, whose items decide what is handed to a collective, or whether it runs."""
    names, inside = targets_of(loop), ast.Module(loop.body, [])
    parts = [*call.args, *(test for module, test in event.undecided if module is event.module)]
    by_item = any(mentions(part, names) for part in parts) or any(
        isinstance(node, ast.Name) and node.id in names for part in call.args for node in made_from(part, inside)
    )
    return loop.iter if by_item and _has_no_order(event.module, loop.iter) else None


def _order_of_parts(module: Module, call: ast.Call) -> ast.expr | None:
    """Return the set in whose order the tensor was put together that a collective is given."""
    body = module.body_around(call)
    for part in call.args[:1]:
        packed = _value_of(module, part, body)
        if isinstance(packed, ast.Call) and last_name(packed.func) in _PACKS and packed.args:
            items = packed.args[0]
            if isinstance(items, (ast.ListComp, ast.GeneratorExp)) and _has_no_order(module, items):
                return items.generators[0].iter
            if isinstance(items, ast.Call) and _has_no_order(module, items):
                return items
    return None


def _value_of(module: Module, node: ast.expr, body: ast.AST) -> ast.expr:
    """Return what a variable is set to, when a function sets it only once; of anything else the expression itself."""
    if not isinstance(node, ast.Name):
        return node
    given = [one.value for one in descend(body) if isinstance(one, ast.Assign) and _assigns(one, node.id)]
    return given[0] if len(given) == 1 else node


def _has_no_order(module: Module, node: ast.expr, depth: int = 0) -> bool:
    """Return whether an expression is a set of several texts or of tensors, or goes through one from its beginning."""
    if depth > _DEEPEST:
        return False
    if isinstance(node, (ast.Name, ast.Attribute)):
        given = list(_given(module, node))
        return bool(given) and all(_has_no_order(module, value, depth + 1) for value in given)
    if isinstance(node, ast.Set):
        return _are_texts(node.elts)
    if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.DictComp)):
        return len(node.generators) == 1 and _has_no_order(module, node.generators[0].iter, depth + 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.BitXor, ast.Sub)):
        return any(_is_set(module, side, depth + 1) for side in (node.left, node.right))
    return isinstance(node, ast.Call) and _call_has_no_order(module, node, depth)


def _call_has_no_order(module: Module, node: ast.Call, depth: int) -> bool:
    last = last_name(node.func)
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    if owner is None and last in _SETS and len(node.args) == 1:
        inner = next(_given(module, node.args[0]), None) if isinstance(node.args[0], _NAMED) else node.args[0]
        if isinstance(inner, (ast.List, ast.Tuple, ast.Set)):
            return _are_texts(inner.elts)
        return isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr in _TENSORS
    if owner is not None and last in _OF_SETS:
        return _is_set(module, owner, depth + 1)
    if last in _KEEPS_ORDER:
        source = owner if owner is not None else node.args[0] if node.args else None
        return source is not None and _has_no_order(module, source, depth + 1)
    results = [
        one.value for function in _called(module, node) for one in descend(function) if isinstance(one, ast.Return)
    ]
    return bool(results) and all(one is not None and _has_no_order(module, one, depth + 1) for one in results)


def _is_set(module: Module, node: ast.expr, depth: int) -> bool:
    """Return whether an operand is itself a set without an order: arithmetic of numbers is written the same way."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        given = list(_given(module, node))
        return bool(given) and depth <= _DEEPEST and all(_is_set(module, value, depth + 1) for value in given)
    is_set = isinstance(node, (ast.Set, ast.BinOp)) or (isinstance(node, ast.Call) and last_name(node.func) in _SETS)
    return is_set and _has_no_order(module, node, depth)


def _given(module: Module, node: ast.Name | ast.Attribute) -> Iterator[ast.expr]:
    """Yield what a variable or attribute is set to; of a parameter, what the calls of its function give."""
    wanted, body = ast.unparse(node), module.body_around(node)
    here = body if isinstance(node, ast.Name) else module.tree
    given = [one.value for one in descend(here) if isinstance(one, ast.Assign) and _assigns(one, wanted)]
    if given or not isinstance(node, ast.Name):
        yield from given
    elif isinstance(body, _FUNCTIONS) and node.id in [one.arg for one in body.args.args]:
        yield from _arguments(module, body, node.id)
    elif body is not module.tree:
        top = (one for one in module.tree.body if isinstance(one, ast.Assign) and _assigns(one, wanted))
        yield from (one.value for one in top)


def _arguments(module: Module, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[ast.expr]:
    names = [one.arg for one in function.args.args]
    position = names.index(name) - (names[0] == "self")
    for call in module.index.of(ast.Call):
        if last_name(call.func) == function.name and function in _called(module, call):
            named = [word.value for word in call.keywords if word.arg == name]
            yield from named or call.args[position : position + 1]


def _called(module: Module, node: ast.Call) -> list[ast.FunctionDef]:
    """Return the function of the module that a call runs by its name; of a module of torch, its ``forward``."""
    found = [one for one in module.index.of(ast.FunctionDef) if one.name == last_name(node.func)]
    if found or not isinstance(node.func, ast.Name):
        return found if len(found) == 1 else []
    made = _value_of(module, node.func, module.body_around(node))
    names = {last_name(one.func) for one in descend(made) if isinstance(one, ast.Call)}
    classes = [one for one in module.index.of(ast.ClassDef) if one.name in names]
    inside = [one for cls in classes for one in cls.body if isinstance(one, ast.FunctionDef) and one.name == "forward"]
    return inside if len(inside) == 1 else []


def _assigns(statement: ast.Assign, name: str) -> bool:
    return [ast.unparse(target) for target in statement.targets] == [name]


def _are_texts(elements: list[ast.expr]) -> bool:
    """Return whether several different texts are written out: numbers have the same order in every process."""
    texts = {element.value for element in elements if isinstance(element, ast.Constant)}
    return len(texts) > 1 and all(isinstance(text, str) for text in texts) and len(elements) >= len(texts)
