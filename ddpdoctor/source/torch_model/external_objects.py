"""Calls that make an object: loaders, samplers, DDP, groups and devices, ``partial``, ``super`` and ``dict``."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    NONE,
    OPAQUE,
    BoundMethod,
    Const,
    DictValue,
    External,
    ExternalObject,
    Partial,
    SequenceValue,
    Value,
    by_rank,
    constant,
    derived,
)
from ddpdoctor.source.torch_model.ddp import wrap
from ddpdoctor.source.torch_model.library_calls import Named
from ddpdoctor.source.vocabulary import DATA_LOADER, DISTRIBUTED_SAMPLER, ENGINE


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
    return SequenceValue((engine, rest, _divided_loader(machine, node, named.get("training_data", NONE)), rest))


def _divided_loader(machine: Machine, node: ast.AST, dataset: Value) -> Value:
    """Return the loader that an engine makes of a data set, which gives each rank its part; None for no data set."""
    if constant(dataset) is None:
        return NONE
    number = machine.object_number((node, "training_data"))
    machine.prepared.add(number)
    machine.emit("loader", DATA_LOADER, node, (), {"dataset": dataset}, number=number, complete=False)
    return ExternalObject(number, DATA_LOADER)


def _values_of_pairs(positional: list[Value]) -> list[Value]:
    """Return the values of ``dict(zip(names, values))``, which are what comes out of it."""
    first = positional[0] if len(positional) == 1 else None
    pairs = first.values if isinstance(first, SequenceValue) else ()
    if not pairs or any(not isinstance(pair, SequenceValue) or pair.open or len(pair.values) != 2 for pair in pairs):
        return positional
    return [pair.values[1] for pair in pairs if isinstance(pair, SequenceValue)]


WORLD_GROUP = External("torch.distributed.group.WORLD")


def make_group(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return a group; all ranks take part in making it, unless it is local."""
    if constant(named.get("use_local_synchronization", Const(False))) is False:
        machine.emit("collective", "new_group", node, positional, named, in_tree=True)
    ranks = named.get("ranks", positional[0] if positional else NONE)
    return (
        WORLD_GROUP
        if complete and constant(ranks) is None
        else ExternalObject(machine.object_number(node), "ProcessGroup")
    )


def make_loader(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return the loader, and note how it was made."""
    number = machine.object_number(node)
    machine.emit("loader", DATA_LOADER, node, positional, named, number=number, complete=complete)
    return ExternalObject(number, DATA_LOADER)


def make_sampler(
    machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool, *, number: int = 0
) -> Value:
    """Return the sampler, and note how it was made; ``number`` is that of an object of a class derived from it."""
    number = number or machine.object_number(node)
    machine.emit("sampler", DISTRIBUTED_SAMPLER, node, positional, named, number=number, complete=complete)
    return ExternalObject(number, DISTRIBUTED_SAMPLER)


def make_ddp(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return the module as DDP wraps it, with the devices that it is given."""
    for value in (named.get("device_ids"), positional[1] if len(positional) > 1 else None):
        if value is not None and constant(value) is not None:
            note_device(machine, node, "device_ids", [value], {})
    return wrap(machine, node, positional, named, complete)


def set_device(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Note the device that a rank chooses for itself."""
    note_device(machine, node, "set_device", positional, named)
    return NONE


def make_device(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return a device, and note its index."""
    if len(positional) > 1 and constant(positional[0]) == "cuda":
        note_device(machine, node, "device", positional[1:2], {})
        return by_rank(lambda index: _text_of_device(index), positional[1])
    return positional[0] if len(positional) == 1 else derived(positional)


def _text_of_device(index: Value) -> Value:
    return Const(f"cuda:{constant(index)}") if isinstance(index, Const) else derived((index,))


def note_device(
    machine: Machine, node: ast.AST, name: str, positional: list[Value], named: Mapping[str, Value]
) -> None:
    """Note what a rank gives as its device."""
    value = positional[0] if positional else named.get("device")
    if value is not None:
        machine.emit("device", name, node, [value])
