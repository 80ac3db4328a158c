"""Assignments: where a value goes."""

from __future__ import annotations

import ast

from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    Built,
    Const,
    Function,
    Instance,
    Items,
    Mapped,
    ProjectClass,
    TensorSize,
    Value,
    by_rank,
    constant,
    derived,
    join,
    options_of,
)
from ddpdoctor.source.torch_model.recorded_calls import note_item
from ddpdoctor.source.torch_model.recorded_training import note_attribute_set


def scope_of(machine: Machine, name: str) -> int:
    """The scope that an assignment to a name writes."""
    frame = machine.frames[-1]
    if name in frame.globals:
        return machine.scope_modules[frame.module.name]
    if name in frame.nonlocals:
        for scope in frame.scopes[1:]:
            if machine.store.get(scope, name) is not None:
                return scope
    return frame.scope


def _scope_that_holds(machine: Machine, name: str) -> int:
    """The scope of the variable that a name stands for here."""
    frame = machine.frames[-1]
    scopes = (*frame.scopes, machine.scope_modules[frame.module.name])
    return next((scope for scope in scopes if machine.store.get(scope, name) is not None), frame.scope)


def assign_to(machine: Machine, target: ast.expr, value: Value) -> None:
    """Assign a value to a name, an attribute, an item, or several of them."""
    if target.__class__ is ast.Name:
        machine.assign(scope_of(machine, target.id), target.id, value)
    elif isinstance(target, ast.Attribute):
        _assign_attribute(machine, target, value)
    elif isinstance(target, ast.Subscript):
        _assign_item(machine, target, value)
    elif isinstance(target, ast.Starred):
        assign_to(machine, target.value, derived((value,)))
    elif isinstance(target, (ast.Tuple, ast.List)):
        for index, part in enumerate(target.elts):
            exact = not any(isinstance(element, ast.Starred) for element in target.elts)
            assign_to(machine, part, item_at(value, index) if exact else derived((value,)))


def item_at(value: Value, key: object) -> Value:
    """The value of ``value[key]`` for a constant key."""

    def of_one(container: Value) -> Value:
        if isinstance(container, Items) and isinstance(key, int):
            if container.open and container.values:
                return container.values[0]
            if not container.open and -len(container.values) <= key < len(container.values):
                return container.values[key]
        if isinstance(container, Mapped):
            for name, entry in container.entries:
                if name == key:
                    return entry
        text = container.value if isinstance(container, Const) else None
        if isinstance(text, str) and isinstance(key, int) and -len(text) <= key < len(text):
            return Const(text[key])
        return derived((container,))

    return by_rank(of_one, value)


def _assign_attribute(machine: Machine, target: ast.Attribute, value: Value) -> None:
    owner = machine.evaluate(machine, target.value)
    owners = [option for option in options_of(owner) if isinstance(option, (Instance, Built))]
    for owner in owners:
        note_attribute_set(machine, target, owner, value)
        if len(owners) > 1:
            value = join(machine.store.get(owner.number, target.attr), value)
        machine.assign(owner.number, target.attr, value)


def _assign_item(machine: Machine, target: ast.Subscript, value: Value) -> None:
    container = machine.evaluate(machine, target.value)
    index = machine.evaluate(machine, target.slice)
    note_item(machine, target, container, index, value)
    key = constant(index)
    if isinstance(container, Mapped) and key is not ...:
        entries = dict(container.entries)
        entries[key] = value
        changed = Mapped(tuple(entries.items()))
        if isinstance(target.value, ast.Name) and isinstance(value, (Function, ProjectClass)):
            # A registry, which is often filled by a decorator, far from where its name belongs.
            machine.assign(_scope_that_holds(machine, target.value.id), target.value.id, changed)
        else:
            assign_to(machine, target.value, changed)
    elif isinstance(container, (Mapped, Items, TensorSize)):
        assign_to(machine, target.value, derived((container, value)))


def forget(machine: Machine, target: ast.expr) -> None:
    """What ``del`` does: the value is not known any more."""
    if isinstance(target, ast.Name):
        machine.assign(scope_of(machine, target.id), target.id, derived(()))


def overwrite(machine: Machine, node: ast.expr, value: Value) -> None:
    """Give a variable a value because a called function wrote into it."""
    while isinstance(node, (ast.Subscript, ast.Starred)):
        node = node.value
    if isinstance(node, (ast.Name, ast.Attribute)):
        assign_to(machine, node, value)
    elif isinstance(node, (ast.List, ast.Tuple)):
        for element in node.elts:
            overwrite(machine, element, value)
