"""Calls that change nothing which ranks have to agree on, and that checks look at all the same."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import lru_cache

from ddpdoctor.source.events import EventKind
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import External, Value, constant, tags_of
from ddpdoctor.source.torch_model.recorded_names import (
    ENVIRONMENT,
    GROUP_SETTINGS,
    KEPT_METHODS,
    READING_FUNCTIONS,
    READING_METHODS,
    RECORDED_BUILTINS,
    SEEDING,
    SET_DEFAULT,
    SET_PARAM_GROUP,
    SET_VARIABLE,
    TRAINING_METHODS,
)


def note_call(
    machine: Machine, node: ast.AST, name: str, positional: Sequence[Value], named: Mapping[str, Value], complete: bool
) -> None:
    """Record a call of an external function; of those of Python itself only the few that checks look at."""
    if name in RECORDED_BUILTINS or not name.startswith("builtins."):
        machine.note("call", name, node, positional, named, complete)
    elif name in READING_FUNCTIONS and any(kind in ("batch", "ddp") for one in positional for kind, _ in tags_of(one)):
        machine.note("call", name, node, positional, named, complete, positional[0])
    if name == f"{ENVIRONMENT}.setdefault" and positional:
        machine.note("call", SET_DEFAULT, node, positional, named, complete)


def note_method(
    machine: Machine,
    node: ast.AST,
    receiver: Value,
    name: str,
    positional: Sequence[Value],
    named: Mapping[str, Value],
    complete: bool,
) -> None:
    """Record a call of a method, if a check may look at it."""
    for kind in _kinds_of_method(name):
        machine.note(kind, name, node, positional, named, complete, receiver)
    if name in READING_METHODS:
        if any(kind in ("batch", "ddp") for kind, _ in tags_of(receiver)):
            machine.note("call", name, node, positional, named, complete, receiver)
    elif name == "cuda" and not positional and "device" not in named:
        machine.note("call", name, node, positional, named, complete, receiver)


def is_noted_method(name: str) -> bool:
    """Return whether some calls of a method may be recorded."""
    return name == "cuda" or name in READING_METHODS or bool(_kinds_of_method(name))


def note_item(machine: Machine, node: ast.AST, container: Value, key: Value, value: Value) -> None:
    """Record an assignment to a variable of the environment, or to a setting of an optimizer."""
    if {kind for kind, _ in tags_of(container)} == {"param-groups"} and constant(key) in GROUP_SETTINGS:
        machine.note("training", SET_PARAM_GROUP, node, (key, value), receiver=container)
    if container == External(ENVIRONMENT) and isinstance(constant(key), str):
        machine.note("call", SET_VARIABLE, node, (key, value))


@lru_cache(maxsize=16_384)
def _kinds_of_method(name: str) -> tuple[EventKind, ...]:
    kinds: list[EventKind] = ["call"] if name in KEPT_METHODS else []
    if name in TRAINING_METHODS or SEEDING.search(name):
        kinds.append("training")
    return tuple(kinds)
