"""Calls that build a value of others: ``partial``, ``super`` and ``dict``."""

from __future__ import annotations

import ast

from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import OPAQUE, BoundMethod, DictValue, Partial, SequenceValue, Value, derived
from ddpdoctor.source.torch_model.library_calls import Named


def make_partial(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """``functools.partial``."""
    if not positional or not complete:
        return OPAQUE
    return Partial(positional[0], tuple(positional[1:]), tuple(named.items()))


def make_super(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """``super()``: the object of the method, as one of its base classes has it."""
    owner = machine.frame.owner
    receiver = owner.receiver if owner is not None and owner.receiver is not None else OPAQUE
    return BoundMethod(receiver, "super()")


def make_dict(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """``dict(...)``."""
    known = not positional or (len(positional) == 1 and isinstance(positional[0], DictValue))
    if not (known and complete):
        return derived([*_values_of_pairs(positional), *named.values()])
    first = positional[0] if positional else None
    entries = dict(first.entries) if isinstance(first, DictValue) else {}
    return DictValue(tuple((entries | named).items()))


def _values_of_pairs(positional: list[Value]) -> list[Value]:
    """Of ``dict(zip(names, values))`` what comes out of it: its values."""
    first = positional[0] if len(positional) == 1 else None
    pairs = first.values if isinstance(first, SequenceValue) else ()
    if not pairs or any(not isinstance(pair, SequenceValue) or pair.open or len(pair.values) != 2 for pair in pairs):
        return positional
    return [pair.values[1] for pair in pairs if isinstance(pair, SequenceValue)]
