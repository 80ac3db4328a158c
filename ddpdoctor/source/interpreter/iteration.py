"""What loops and comprehensions go over, and what comprehensions make of it."""

from __future__ import annotations

import ast
from collections.abc import Callable

from ddpdoctor.source.interpreter.assignment import assign_to, item_of
from ddpdoctor.source.interpreter.attributes import bound_to, class_attribute
from ddpdoctor.source.interpreter.calls import call_function
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    RANKS,
    Const,
    DictValue,
    Function,
    Instance,
    PerRank,
    SequenceValue,
    Value,
    by_rank,
    constant,
    derived,
    on_rank,
)
from ddpdoctor.source.ranks.data_partitions import filtered
from ddpdoctor.source.script.syntax_index import descend, last_name

MAXIMUM_ITEMS = 20
"""Of a list whose items are looked at one by one."""
_READING = frozenset({"int", "str", "float", "get", "getenv"})
"""Functions that make no object."""


def iterated(machine: Machine, iterable: Value) -> tuple[Value, list[int | None], int]:
    """Return an item that stands for any turn, the turns by rank where known, and the mask of the ranks with none."""
    if iterable.__class__ is not PerRank:
        count = len(iterable.values) if isinstance(iterable, SequenceValue) and not iterable.open else None
        return item_of(iterable), [count] * len(RANKS), ALL_RANKS if count == 0 else 0
    turns: list[int | None] = []
    empty = 0
    for rank in RANKS:
        entry = on_rank(iterable, rank)
        count = len(entry.values) if isinstance(entry, SequenceValue) and not entry.open else None
        turns.append(count)
        if count == 0:
            empty |= 1 << rank
    return by_rank(lambda entry: item_of(entry), iterable), turns, empty


def opened(machine: Machine, node: ast.expr) -> Value:
    """Return what a loop goes over: of an object of the project, what its ``__iter__`` gives."""
    value = machine.evaluate(machine, node)
    if isinstance(value, Instance):
        method = class_attribute(machine, value.cls, "__iter__")
        if isinstance(method, Function):
            items = call_function(machine, node, bound_to(method, value), [], {})
            return items if isinstance(items, SequenceValue) else value
    return value


def comprehension(machine: Machine, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> Value:
    """Return the list, set or generator of a comprehension, with any number of items."""
    value = _in_generators(machine, node.generators, lambda: machine.evaluate(machine, node.elt))
    return SequenceValue((filtered(machine, node, node.generators[0].ifs, value),), open=True)


def dict_comprehension(machine: Machine, node: ast.DictComp) -> Value:
    """Return the dict of a comprehension over a literal list, ``{name: os.environ[name] for name in ("RANK", ...)}``.

    Of another one the keys are not known: reading it gives its values.
    """
    written = _written_out(machine, node)
    if written is not None:
        return written

    def pair() -> Value:
        machine.evaluate(machine, node.key)
        return machine.evaluate(machine, node.value)

    return derived((_in_generators(machine, node.generators, pair),))


def _written_out(machine: Machine, node: ast.DictComp) -> Value | None:
    """Return the dict that a comprehension makes of a few constants; None where it goes over anything else."""
    generator = node.generators[0]
    if len(node.generators) > 1 or generator.ifs or not isinstance(generator.iter, (ast.Tuple, ast.List, ast.Name)):
        return None
    calls = (inner for inner in descend(node.value) if isinstance(inner, ast.Call))
    if any(last_name(call.func) not in _READING for call in calls):
        return None  # What is made by one call is one object, whatever the item.
    items = machine.evaluate(machine, generator.iter)
    if not isinstance(items, SequenceValue) or items.open or len(items.values) > MAXIMUM_ITEMS:
        return None
    if not all(isinstance(item, Const) for item in items.values):
        return None
    entries: dict[object, Value] = {}
    for item in items.values:
        assign_to(machine, generator.target, item)
        key = constant(machine.evaluate(machine, node.key))
        if not isinstance(key, (str, int)):
            return None
        entries[key] = machine.evaluate(machine, node.value)
    return DictValue(tuple(entries.items()))


def _in_generators(machine: Machine, generators: list[ast.comprehension], result: Callable[[], Value]) -> Value:
    """Evaluate a comprehension's result once, as the body of a loop; items that no rank has are uniform."""
    found: list[Value] = []

    def turn() -> None:
        for generator in generators:
            item, _, _ = iterated(machine, opened(machine, generator.iter))
            assign_to(machine, generator.target, item)
            for condition in generator.ifs:
                machine.evaluate(machine, condition)
        found.append(result())

    machine.add_loop(machine.collect(turn), [None] * len(RANKS), generators[0].iter)
    return found[0]
