"""Objects that hold a configuration, whose defaults in the source a file or the command line replaces."""

from __future__ import annotations

from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    UNIFORM,
    Const,
    DictValue,
    ExternalObject,
    SequenceValue,
    Value,
    options_of,
)

MERGES = frozenset({"merge_from_file", "merge_from_list", "merge_from_dict", "merge_from_other_cfg"})
"""Methods of yacs, fvcore, detectron2 and mmcv by which settings of the user replace the defaults."""


def merge(machine: Machine, receiver: Value) -> Value:
    """Make the settings of a configuration and of those in it unknown, but the same on every rank."""
    waiting = [option for option in options_of(receiver) if isinstance(option, ExternalObject)]
    seen: set[int] = set()
    while waiting:
        number = waiting.pop().number
        if number in seen:
            continue
        seen.add(number)
        for name in machine.store.names(number):
            value = machine.store.get(number, name)
            if isinstance(value, (Const, DictValue, SequenceValue)):
                machine.assign(number, name, UNIFORM)
            elif isinstance(value, ExternalObject):
                waiting.append(value)
    return UNIFORM
