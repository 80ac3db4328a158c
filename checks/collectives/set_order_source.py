"""What follows the order of a set, which is another one in every process: collectives, and the parts of models."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ALL_RANKS, Instance
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.divergence import mentions
from ddpdoctor.source.queries.set_order import SetOrders, fixes_order
from ddpdoctor.source.script.module import Module, descend, last_name, made_from
from ddpdoctor.source.torch_model.buffers import parts_of_module

# Functions that put tensors or numbers one after another.
_PACKS = frozenset({"stack", "cat", "concatenate", "tensor", "as_tensor", "array", "FloatTensor", "Tensor"})
# Methods and functions that give a module a part, a parameter or a buffer by its name.
_REGISTERS = frozenset({"register_buffer", "register_parameter", "register_module", "add_module", "setattr"})
# Modules that hold others by their names, in the order of the names, and those that hold them one after another.
_KEYED = frozenset({"ModuleDict", "ParameterDict"})
_LISTED = frozenset({"ModuleList", "ParameterList", "Sequential"})


_InOrder = tuple[Event, Module, ast.expr]
"""What follows the order of a set, and that order with its module."""


def collectives_in_set_order(projection: Projection) -> Iterator[_InOrder]:
    """Yield collectives on what a loop over a set names, or on what was put together in its order; with that order."""
    script = projection.machine.script
    if fixes_order(script):
        return
    orders = SetOrders(script.modules)
    seen: set[ast.AST] = set()
    for event in projection.of_kind("collective"):
        if event.node in seen or event.ranks != ALL_RANKS or not isinstance(event.node, ast.Call):
            continue
        if not event.loops and not event.node.args:
            continue
        loop = event.loops[-1].node if event.loops else None
        order = _order_of_loop(orders, event, event.node, loop) if isinstance(loop, ast.For) else None
        order = order or _order_of_parts(orders, event.module, event.node)
        if order is not None:
            seen.add(event.node)
            yield event, event.module, order


def models_in_set_order(projection: Projection) -> Iterator[_InOrder]:
    """Yield wraps of models whose parts or buffers were registered in a set's order: DDP pairs them by position.

    So are those that join what their parts give in such an order: the next layer's weights meet other inputs.
    """
    script = projection.machine.script
    if fixes_order(script):
        return
    orders = SetOrders(script.modules)
    for wrap in projection.of_kind("wrap"):
        wrapped = wrap.argument("module", 0)
        parts = () if wrapped is None else parts_of_module(projection.machine, wrapped, registered=True)
        for cls in dict.fromkeys(part.cls for part in parts if isinstance(part, Instance)):
            module = script.module(cls.module)
            for node in descend(cls.node) if module is not None else ():
                if module is None:
                    continue
                order = _order_of_registration(orders, module, node) or _order_of_joined(module, node)
                if order is not None and orders.is_lost(module, order):
                    yield wrap, module, order


def _order_of_registration(orders: SetOrders, module: Module, node: ast.AST) -> ast.expr | None:
    """Return what a loop goes over that registers something in each turn, or a dict of modules is made of."""
    if isinstance(node, ast.For):
        names = names_of(node.target)
        registers = any(
            (isinstance(one, ast.Call) and last_name(one.func) in _REGISTERS and mentions(one, names))
            or (isinstance(one, ast.Call) and _appends_part(orders, module, one) and _tells_apart(module, node, names))
            or (isinstance(one, ast.Assign) and any(_is_part(orders, module, target, names) for target in one.targets))
            for one in descend(node)
        )
        return node.iter if registers else None
    if not isinstance(node, ast.Call) or not node.args:
        return None
    last, items = last_name(node.func), node.args[0].value if isinstance(node.args[0], ast.Starred) else node.args[0]
    if last in _KEYED:
        return items.generators[0].iter if isinstance(items, ast.DictComp) else items
    if last in _LISTED and isinstance(items, (ast.ListComp, ast.GeneratorExp)):
        generator = items.generators[0]
        return generator.iter if _tells_apart(module, items, names_of(generator.target)) else None
    return None


def _tells_apart(module: Module, loop: ast.For | ast.ListComp | ast.GeneratorExp, names: list[str]) -> bool:
    """Return whether the parts that a loop makes stand for its items: by these, or by a loop of another method."""
    inside = loop.body if isinstance(loop, ast.For) else [loop.elt]
    if any(mentions(part, names) for part in inside):
        return True
    order = loop.iter if isinstance(loop, ast.For) else loop.generators[0].iter
    cls = next((one for one in module.ancestors(loop) if isinstance(one, ast.ClassDef)), None)
    method, known = module.body_around(loop), ast.unparse(order)
    kept, held = {known}, set[str]()
    for one in descend(method):
        if isinstance(one, ast.Assign) and ast.unparse(one.value) == known:
            kept.add(ast.unparse(one.targets[0]))
        elif isinstance(one, ast.Assign) and last_name(getattr(one.value, "func", one.value)) in _LISTED:
            held.add(ast.unparse(one.targets[0]))
    return cls is not None and any(
        _goes_over(other, kept)
        and held & {ast.unparse(one) for one in descend(other) if isinstance(one, ast.Attribute)}
        for other in cls.body
        if other is not method
    )


def _goes_over(method: ast.stmt, names: set[str]) -> bool:
    iterables = [one.iter for one in descend(method) if isinstance(one, (ast.For, ast.comprehension))]
    parts = (part for one in iterables for part in descend(one) if isinstance(part, ast.Attribute))
    return any(ast.unparse(part) in names for part in parts)


def _appends_part(orders: SetOrders, module: Module, call: ast.Call) -> bool:
    """Return whether a call adds a module to a list of modules."""
    if last_name(call.func) != "append" or not isinstance(call.func, ast.Attribute):
        return False
    given = orders.given(module, call.func.value)
    return bool(given) and all(isinstance(one, ast.Call) and last_name(one.func) in _LISTED for _, one in given)


def _is_part(orders: SetOrders, module: Module, target: ast.expr, names: list[str]) -> bool:
    if not isinstance(target, ast.Subscript) or not mentions(target, names):
        return False
    given = orders.given(module, target.value)
    return any(isinstance(one, ast.Call) and last_name(one.func) in _KEYED for _, one in given)


def _order_of_joined(module: Module, node: ast.AST) -> ast.expr | None:
    """Return the order in which a model joins what it makes of its parts, for a layer to take."""
    if not isinstance(node, ast.Call) or last_name(node.func) not in ("cat", "stack") or not node.args:
        return None
    items, body = node.args[0], module.body_around(node)
    if isinstance(items, (ast.ListComp, ast.GeneratorExp)):
        return items.generators[0].iter if mentions(items.elt, names_of(items.generators[0].target)) else None
    for loop in (one for one in descend(body) if isinstance(one, ast.For) and isinstance(items, ast.Name)):
        for one in descend(loop):
            if isinstance(one, ast.Call) and ast.unparse(one.func) == f"{ast.unparse(items)}.append":
                return loop.iter if mentions(one, names_of(loop.target)) else None
    return None


def names_of(target: ast.expr) -> list[str]:
    """Return the variables that a target binds."""
    return [node.id for node in descend(target) if isinstance(node, ast.Name)]


def _order_of_loop(orders: SetOrders, event: Event, call: ast.Call, loop: ast.For) -> ast.expr | None:
    """Return the set that a loop goes over, whose items decide what is handed to a collective, or whether it runs."""
    names, inside = names_of(loop.target), ast.Module(loop.body, [])
    parts = [*call.args, *(test for module, test in event.undecided if module is event.module)]
    by_item = any(mentions(part, names) for part in parts) or any(
        isinstance(node, ast.Name) and node.id in names for part in call.args for node in made_from(part, inside)
    )
    return loop.iter if by_item and orders.is_lost(event.module, loop.iter) else None


def _order_of_parts(orders: SetOrders, module: Module, call: ast.Call) -> ast.expr | None:
    """Return the set in whose order the tensor was put together that a collective is given."""
    for part in call.args[:1]:
        # What is computed with it afterwards, as a division in place, leaves its order.
        given = [one for _, one in orders.given(module, part) if isinstance(one, ast.Call)]
        packs = [one for one in given if last_name(one.func) in _PACKS]
        packed = packs[0] if len(packs) == 1 else part
        if isinstance(packed, ast.Call) and last_name(packed.func) in _PACKS and packed.args:
            items = packed.args[0]
            if isinstance(items, (ast.ListComp, ast.GeneratorExp)) and orders.is_lost(module, items):
                return items.generators[0].iter
            if isinstance(items, ast.Call) and orders.is_lost(module, items):
                return items
    return None
