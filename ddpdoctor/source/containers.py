"""What a list or a dict is after a method changed it."""

from __future__ import annotations

from ddpdoctor.source.machine import Machine
from ddpdoctor.source.values import Items, Lanes, Value, derived, join


def mutated(machine: Machine, receiver: Value, name: str, arguments: list[Value]) -> Value:
    """The container after a call of one of its methods; a list that grows in a loop holds any number of such items."""
    if name != "append" or not isinstance(receiver, Items) or len(arguments) != 1 or isinstance(arguments[0], Lanes):
        return derived([receiver, *arguments])
    if not machine.loops and not receiver.open:
        return Items((*receiver.values, arguments[0]))
    item: Value = arguments[0]
    for other in receiver.values:
        item = join(other, item)
    return Items((item,), open=True)
