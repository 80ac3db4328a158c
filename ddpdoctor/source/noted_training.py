"""What a script does to its model, optimizer and random numbers, kept for the checks of data and gradients."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ddpdoctor.source.buffers import parts_of_module
from ddpdoctor.source.noted_training_names import SEEDING, TRAINING_CALLS, TRAINING_METHODS
from ddpdoctor.source.values import Built, Instance, Value, tagged
from ddpdoctor.source.vocabulary import DDP

if TYPE_CHECKING:
    from ddpdoctor.source.machine import Machine


def note_training_call(
    machine: Machine, node: ast.AST, name: str, positional: Sequence[Value], named: Mapping[str, Value], complete: bool
) -> None:
    """Keep a call of an external function that prepares data, draws or fixes random numbers, or takes gradients."""
    if name in TRAINING_CALLS or SEEDING.search(name.rpartition(".")[2]):
        _emit(machine, name, node, positional, named, complete)


def note_training_method(
    machine: Machine,
    node: ast.AST,
    receiver: Value,
    name: str,
    positional: Sequence[Value],
    named: Mapping[str, Value],
    complete: bool,
) -> None:
    """Keep a call of a method of a model, an optimizer or a generator of random numbers."""
    if name in TRAINING_METHODS or SEEDING.search(name):
        _emit(machine, name, node, positional, named, complete, receiver)


def note_attribute(machine: Machine, node: ast.AST, name: str, value: Value) -> None:
    """Keep that an attribute is asked of a DDP object, outside of a ``try`` that may catch its absence."""
    if isinstance(value, Built) and value.name == DDP and not machine.trying:
        _emit(machine, f"ddp.{name}", node, (), {}, True, value)


def note_attribute_set(machine: Machine, node: ast.AST, owner: Value, value: Value) -> None:
    """Keep that a module is given a new attribute outside of its own constructor."""
    if not isinstance(owner, Instance) or not isinstance(value, (Instance, Built)):
        return
    if any(frame.owner is not None and frame.owner.receiver == owner for frame in machine.frames):
        return
    _emit(machine, "set attribute", node, (value,), {}, True, owner)


def note_wrap(machine: Machine, module: Value | None, wrap: int) -> None:
    """Remember the modules inside a DDP object, so that a forward past it is recognised."""
    if module is None:
        return
    for part in parts_of_module(machine, module):
        if isinstance(part, (Instance, Built)):
            machine.wrapped.setdefault(part.number, wrap)


def bare_forward(
    machine: Machine,
    node: ast.AST,
    module: Value,
    positional: Sequence[Value],
    named: Mapping[str, Value],
    result: Value,
) -> Value:
    """The result of a forward (or another method) of a module inside a DDP object that was not called through it."""
    if not isinstance(module, (Instance, Built)) or machine.inside_ddp:
        return result
    wrap = machine.wrapped.get(module.number)
    if wrap is None:
        return result
    _emit(machine, "bare forward", node, positional, named, True, module)
    return tagged(result, frozenset({("bare", wrap)})) if machine.gradients else result


def _emit(
    machine: Machine,
    name: str,
    node: ast.AST,
    positional: Sequence[Value],
    named: Mapping[str, Value],
    complete: bool,
    receiver: Value | None = None,
) -> None:
    """Record an event that does not make the function around it worth more walks."""
    emitted = machine.emitted
    machine.emit("training", name, node, positional, named, complete=complete, receiver=receiver)
    machine.emitted = emitted
