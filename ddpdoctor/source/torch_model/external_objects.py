"""Calls that make an object: loaders, samplers, DDP, groups and devices, ``partial``, ``super`` and ``dict``."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from ddpdoctor.source.interpreter.assignment import item_at
from ddpdoctor.source.interpreter.attributes import base_names, bases_of, bound_to, class_attribute, lacks
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    NONE,
    OPAQUE,
    BoundMethod,
    Const,
    DictValue,
    External,
    ExternalObject,
    Function,
    Instance,
    OneOf,
    Partial,
    ProjectClass,
    SequenceValue,
    Sharded,
    Value,
    by_rank,
    constant,
    derived,
    options_of,
)
from ddpdoctor.source.torch_model.ddp import wrap
from ddpdoctor.source.torch_model.library_calls import Named
from ddpdoctor.source.vocabulary import DATA_LOADER, DATA_PARALLEL, DDP, DISTRIBUTED_SAMPLER, ENGINE, MODULE

# What a script asks of the kind of an object: `isinstance(model, DDP)`, `type(model) is DDP`, `hasattr`.

_WRAPPERS = frozenset({DDP, DATA_PARALLEL})
_MODULE = "torch.nn.Module"


def is_instance(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return what ``isinstance`` gives, where the class of the object shows it."""
    if len(positional) != 2:
        return derived(positional[:1])
    return by_rank(partial(_all_alike, machine), *positional)


def has_attribute(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return what ``hasattr`` gives, where the class of the object shows it."""
    name = constant(positional[1]) if len(positional) == 2 else None
    if not isinstance(name, str):
        return derived(positional[:1])
    return by_rank(lambda value: _of_options(value, lambda option: _has(machine, option, name)), positional[0])


def type_of(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return the class of an object."""
    return by_rank(_class_of, positional[0]) if len(positional) == 1 else derived([*positional, *named.values()])


def _class_of(value: Value) -> Value:
    if isinstance(value, ExternalObject):
        return External(value.name)
    if isinstance(value, Instance):
        return value.cls
    if isinstance(value, OneOf):
        classes = tuple(dict.fromkeys(map(_class_of, value.options)))
        return classes[0] if len(classes) == 1 else OneOf(classes, value.varying)
    return derived((value,))


def _all_alike(machine: Machine, value: Value, classes: Value) -> Value:
    wanted = classes.values if isinstance(classes, SequenceValue) and not classes.open else (classes,)
    return _of_options(value, lambda option: _any(_is_one(machine, option, cls) for cls in wanted))


def _of_options(value: Value, answer: Callable[[Value], bool | None]) -> Value:
    """Return what holds of each alternative that a value has; unknown where they differ."""
    answers = {answer(option) for option in options_of(value)}
    known = answers.pop() if len(answers) == 1 else None
    return derived((value,)) if known is None else Const(known)


def _any(answers: Iterable[bool | None]) -> bool | None:
    known = list(answers)
    return True if True in known else None if None in known else False


def _is_one(machine: Machine, option: Value, cls: Value) -> bool | None:
    if isinstance(option, Instance):
        return _derives(machine, option.cls, cls)
    if not isinstance(option, ExternalObject) or not isinstance(cls, External):
        return False if option == Const(None) and isinstance(cls, (External, ProjectClass)) else None
    if option.name == cls.name:
        return True
    if cls.name == _MODULE and (option.name in _WRAPPERS or MODULE.search(option.name)):
        return True
    # A wrapper is no other wrapper, and a plain module is none.
    plain = option.name in _WRAPPERS or MODULE.search(option.name) is not None
    return False if cls.name in _WRAPPERS and plain else None


def _derives(machine: Machine, own: ProjectClass, cls: Value) -> bool | None:
    if own == cls:
        return True
    bases = list(bases_of(machine, own))
    if cls in bases or (isinstance(cls, External) and cls.name in base_names(machine, own)):
        return True
    if isinstance(cls, ProjectClass):
        return False if all(isinstance(base, ProjectClass) for base in bases) else None
    read = all(isinstance(base, ProjectClass) or base == External(_MODULE) for base in bases)
    return False if isinstance(cls, External) and cls.name in _WRAPPERS and read else None


def _has(machine: Machine, option: Value, name: str) -> bool | None:
    if isinstance(option, ExternalObject):
        if machine.store.get(option.number, name) is not None:
            return True
        if name != "module":
            return None
        return True if option.name in _WRAPPERS else False if MODULE.search(option.name) else None
    if isinstance(option, Instance):
        if machine.store.get(option.number, name) is not None or class_attribute(machine, option.cls, name) is not None:
            return True
        plain_module = name == "module" and set(base_names(machine, option.cls)) == {_MODULE}
        return False if plain_module or lacks(machine, option, name) else None
    return False if option == Const(None) else None


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


_GATHERS_IN_FORWARD = 3
"""Stage of ZeRO from which parameters are divided, too."""


def make_engine(machine: Machine, node: ast.AST, positional: list[Value], named: Named, complete: bool) -> Value:
    """Return what ``deepspeed.initialize`` does: the engine, and an optimizer, a loader and a scheduler."""
    rest = derived([*positional, *named.values()])
    parallel = constant(named.get("mpu", NONE)) is not None  # Ranks that hold parts of one model share their data.
    if parallel or not complete:
        return SequenceValue((rest, rest, _divided_loader(machine, node, named.get("training_data", NONE)), rest))
    engine = ExternalObject(machine.object_number(node), ENGINE)
    stage = constant(item_at(item_at(named.get("config", NONE), "zero_optimization"), "stage"))
    if isinstance(stage, int) and stage > 0:
        # From stage 1 on a step gathers what the ranks have updated, each its part; at stage 3 a forward gathers, too.
        machine.sharded[engine.number] = Sharded(True, stage >= _GATHERS_IN_FORWARD, True, with_data=True)
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
    for name, position in (("sampler", 3), ("batch_sampler", 4)):
        sampler = named.get(name, positional[position] if len(positional) > position else NONE)
        for own in (one for one in options_of(sampler) if isinstance(one, Instance)):
            method = class_attribute(machine, own.cls, "__iter__")
            if isinstance(method, Function) and method.node not in machine.visited:  # Its order, as the loader asks.
                machine.call_function(machine, node, bound_to(method, own), [], {})
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
