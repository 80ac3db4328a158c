"""Loaders that a framework takes and gives back divided between the ranks."""

from __future__ import annotations

import ast

from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import ExternalObject, Value, options_of
from ddpdoctor.source.vocabulary import DATA_LOADER


def is_loader(value: Value) -> bool:
    """Return whether a value may be a loader."""
    return any(isinstance(option, ExternalObject) and option.name == DATA_LOADER for option in options_of(value))


def prepared_loader(machine: Machine, node: ast.AST, value: Value, name: str) -> Value:
    """Return what a framework makes of a loader, an object of its own that is divided; another value as it is."""
    made = machine.object(next(options_of(value))) if is_loader(value) else None
    if made is None:
        return value
    number = machine.object_number((node, name))
    machine.prepared.add(number)
    machine.emit("loader", DATA_LOADER, made.node, made.positional, made.named, number=number)
    return ExternalObject(number, DATA_LOADER)
