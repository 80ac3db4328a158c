"""What the methods of a list, a dict or a text give, and what a container is after one of them changed it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import reduce

from ddpdoctor.source.interpreter.assignment import overwrite
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    UNIFORM,
    Bound,
    Built,
    Choice,
    Const,
    External,
    Function,
    Instance,
    Items,
    Lanes,
    Mapped,
    ProjectClass,
    Unknown,
    Value,
    constant,
    derived,
    is_varying,
    join,
)
from ddpdoctor.source.script.syntax_index import descend
from ddpdoctor.source.vocabulary import DATA_LOADER

_MUTATORS = frozenset(
    {"append", "extend", "insert", "update", "pop", "remove", "clear", "add", "setdefault", "fill_", "copy_"}
)
_VIEWS: Mapping[str, Callable[[Mapped], Value]] = {
    "keys": lambda mapped: Items(tuple(Const(key) for key, _ in mapped.entries)),
    "values": lambda mapped: Items(tuple(value for _, value in mapped.entries)),
    "items": lambda mapped: Items(tuple(Items((Const(key), value)) for key, value in mapped.entries)),
}
"""Methods that show what a dict with constant keys holds."""


def container_method(machine: Machine, node: ast.AST, function: Bound, arguments: list[Value]) -> Value | None:
    """What a method of a list, a dict or a text comes to; None when it is not known."""
    receiver, name = function.receiver, function.name
    if isinstance(receiver, Mapped) and name in _VIEWS and not arguments:
        return _VIEWS[name](receiver)
    if isinstance(receiver, Mapped) and name == "get" and arguments:
        key = constant(arguments[0])
        classes = one_of_classes(receiver) if key is ... and not is_varying(arguments[0]) else None
        if classes is not None:
            return classes
        return next((entry for known, entry in receiver.entries if known == key), derived(arguments[1:]))
    if isinstance(receiver, (Items, Mapped)) and name in _MUTATORS and isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            overwrite(machine, node.func.value, _mutated(machine, receiver, name, arguments))
        return UNIFORM
    text = constant(receiver)
    if isinstance(text, str) and not arguments and name in {"lower", "upper", "strip"}:
        return Const(getattr(text, name)())
    return None


def one_of_classes(registry: Mapped) -> Value | None:
    """What a dict of classes, or of functions that make optimizers, gives for a name that is not known.

    None for a dict that holds anything else.
    """
    values = [value for _, value in registry.entries]
    known = (isinstance(value, (External, ProjectClass)) or _makes_optimizers(value) for value in values)
    return reduce(join, values) if values and all(known) else None


def _makes_optimizers(value: Value) -> bool:
    """Whether a function returns what it makes of ``torch.optim``, or of classes of its own by such a name."""
    if not isinstance(value, Function):
        return False
    results = [node.value for node in descend(value.node) if isinstance(node, ast.Return) and node.value is not None]
    return bool(results) and all("optim." in ast.unparse(result) for result in results)


def _mutated(machine: Machine, receiver: Value, name: str, arguments: list[Value]) -> Value:
    """The container after a call of one of its methods; a list that grows in a loop holds any number of such items."""
    if name != "append" or not isinstance(receiver, Items) or len(arguments) != 1 or isinstance(arguments[0], Lanes):
        return derived([receiver, *arguments])
    if not machine.loops and not receiver.open:
        return Items((*receiver.values, arguments[0]))
    item: Value = arguments[0]
    for other in receiver.values:
        item = join(other, item)
    return Items((item,), open=True)


def item_of(entry: Value) -> Value:
    """One item of an iterable of one rank, for any of its items."""
    if isinstance(entry, Items):
        if len(entry.values) == 1:
            return entry.values[0]
        if entry.values and all(isinstance(value, Instance) for value in entry.values):
            return reduce(join, entry.values)
        return derived(entry.values)
    if isinstance(entry, Built) and entry.name == DATA_LOADER:
        return Unknown(varying=True, tags=frozenset({("batch", entry.number)}))
    if isinstance(entry, Choice):
        item: Value | None = None
        for option in entry.options:
            if not isinstance(option, Items) or option.values:
                item = join(item, item_of(option))
        return item or UNIFORM
    if isinstance(entry, Unknown):
        batches = frozenset(("batch", tag[1]) if tag[0] == "loader" else tag for tag in entry.tags)
        varying = entry.varying or any(tag[0] == "batch" for tag in batches)
        return Unknown(varying, False, batches)
    return derived((entry,))
