"""Calls that build a value of others: ``partial``, ``super``, ``dict`` and ``deepspeed.initialize``."""

from __future__ import annotations

import ast

from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    NONE,
    OPAQUE,
    BoundMethod,
    DictValue,
    ExternalObject,
    Partial,
    SequenceValue,
    Value,
    constant,
    derived,
)
from ddpdoctor.source.torch_model.library_calls import Named
from ddpdoctor.source.vocabulary import ENGINE


def make_partial(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return the value of ``functools.partial``."""
    if not positional or not complete:
        return OPAQUE
    return Partial(positional[0], tuple(positional[1:]), tuple(named.items()))


def make_super(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return the object of the method, as one of its base classes has it."""
    owner = machine.frame.owner
    receiver = owner.receiver if owner is not None and owner.receiver is not None else OPAQUE
    return BoundMethod(receiver, "super()")


def make_dict(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return the value of ``dict(...)``."""
    known = not positional or (len(positional) == 1 and isinstance(positional[0], DictValue))
    if not (known and complete):
        return derived([*_values_of_pairs(positional), *named.values()])
    first = positional[0] if positional else None
    entries = dict(first.entries) if isinstance(first, DictValue) else {}
    return DictValue(tuple((entries | named).items()))


def make_engine(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return what ``deepspeed.initialize`` does: the engine, and an optimizer, a loader and a scheduler."""
    rest = derived([*positional, *named.values()])
    parallel = constant(named.get("mpu", NONE)) is not None  # Ranks that hold parts of one model share their data.
    engine = rest if parallel or not complete else ExternalObject(machine.object_number(node), ENGINE)
    return SequenceValue((engine, rest, rest, rest))


def _values_of_pairs(positional: list[Value]) -> list[Value]:
    """Return the values of ``dict(zip(names, values))``, which are what comes out of it."""
    first = positional[0] if len(positional) == 1 else None
    pairs = first.values if isinstance(first, SequenceValue) else ()
    if not pairs or any(not isinstance(pair, SequenceValue) or pair.open or len(pair.values) != 2 for pair in pairs):
        return positional
    return [pair.values[1] for pair in pairs if isinstance(pair, SequenceValue)]
