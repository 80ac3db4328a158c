"""Calls that change nothing which ranks have to agree on, and that checks of launch, state and speed ask about."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from ddpdoctor.source.machine import Machine
from ddpdoctor.source.noted_names import (
    CONTENT_METHODS,
    ENVIRONMENT,
    FILE_METHODS,
    NOTED_CALLS,
    READING_METHODS,
    SET_DEFAULT,
    SET_VARIABLE,
    STATE_METHODS,
    TRACKING_METHODS,
)
from ddpdoctor.source.values import External, Value, constant, tags_of

_KEPT_METHODS = STATE_METHODS | FILE_METHODS | CONTENT_METHODS | TRACKING_METHODS


def note_call(
    machine: Machine, node: ast.AST, name: str, positional: Sequence[Value], named: Mapping[str, Value], complete: bool
) -> None:
    """Keep a call of an external function, if a check may ask about it."""
    if name in NOTED_CALLS:
        _emit(machine, name, node, positional, named, complete)
    elif name == f"{ENVIRONMENT}.setdefault" and positional:
        _emit(machine, SET_DEFAULT, node, positional, named, complete)


def note_method(
    machine: Machine,
    node: ast.AST,
    receiver: Value,
    name: str,
    positional: Sequence[Value],
    named: Mapping[str, Value],
    complete: bool,
) -> None:
    """Keep a call of a method, if a check may ask about it."""
    if name in _KEPT_METHODS:
        _emit(machine, name, node, positional, named, complete, receiver)
    elif name in READING_METHODS:
        if any(kind in ("batch", "ddp") for kind, _ in tags_of(receiver)):
            _emit(machine, name, node, positional, named, complete, receiver)
    elif name == "cuda" and not positional and "device" not in named:
        _emit(machine, name, node, positional, named, complete, receiver)


def note_item(machine: Machine, node: ast.AST, container: Value, key: Value, value: Value) -> None:
    """Keep an assignment to a variable of the environment."""
    if container == External(ENVIRONMENT) and isinstance(constant(key), str):
        _emit(machine, SET_VARIABLE, node, (key, value), {}, True)


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
    machine.emit("call", name, node, positional, named, complete=complete, receiver=receiver)
    machine.emitted = emitted
