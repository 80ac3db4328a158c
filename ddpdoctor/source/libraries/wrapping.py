"""What Accelerate, Lightning's Fabric and Ignite do for ranks: they start them, wrap models and divide loaders."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce

from ddpdoctor.files import regex
from ddpdoctor.source.interpreter.attributes import base_names
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    NONE,
    OPAQUE,
    UNIFORM,
    Arguments,
    Const,
    External,
    ExternalObject,
    Function,
    Instance,
    OneOf,
    Partial,
    SequenceValue,
    Unknown,
    Value,
    constant,
    derived,
    join,
    options_of,
)
from ddpdoctor.source.libraries.lightning import options_of_ddp
from ddpdoctor.source.libraries.rank_attributes import ACCELERATOR, is_loader, prepared_loader
from ddpdoctor.source.ranks.ranks import LOCAL_RANK, exact_per_rank
from ddpdoctor.source.torch_model.ddp import PASSED_ON, UNKNOWN_OPTIONS, wrap
from ddpdoctor.source.vocabulary import DATA_LOADER, DDP, FABRICS, MODULE


def method(machine: Machine, node: ast.AST, receiver: ExternalObject, name: str, given: Arguments) -> Value | None:
    """Do a method of an object of one of these, and return its result; None for one like any other."""
    own = {ACCELERATOR: _of_accelerator, **dict.fromkeys(FABRICS, _of_fabric)}.get(receiver.name, _of_parallel)
    return own(machine, node, receiver, name, given)


# Accelerate.

DEEPEST = 10
"""Modules within modules that are looked into."""
_MODEL_NAME = regex(r"model|net(work)?$|unet|encoder|decoder|generator|discriminator", re.IGNORECASE)


def _of_accelerator(
    machine: Machine, node: ast.AST, receiver: ExternalObject, name: str, given: Arguments
) -> Value | None:
    if name in {"prepare", "prepare_model", "prepare_data_loader"}:
        names = [ast.unparse(argument).rpartition(".")[2] for argument in getattr(node, "args", ())]
        options = _options_of_ddp(machine, receiver)
        prepared = [
            prepared_loader(machine, node, value, str(index))
            if is_loader(value)
            else _prepared(machine, node, value, names[index] if index < len(names) else "", options)
            for index, value in enumerate(given.positional)
        ]
        return _one_or_all(prepared)
    if name == "accumulate":
        machine.note("training", name, node, given, receiver=receiver)
    if name == "unwrap_model" and given.positional:
        made = machine.object(given.positional[0])
        inner = made.argument("module", 0) if made is not None and made.name == DDP else None
        return inner or derived(given.positional[:1])
    return None


def _options_of_ddp(machine: Machine, accelerator: ExternalObject) -> Mapping[str, Value]:
    """Return what an Accelerator hands on to DDP; every option where its handlers, or which they are, are not known."""
    made = machine.object(accelerator)
    if made is None or not made.complete:
        return UNKNOWN_OPTIONS
    handlers = made.named.get("kwargs_handlers", NONE)
    listed = handlers.values if isinstance(handlers, SequenceValue) and not handlers.open else (handlers,)
    if any(not isinstance(handler, ExternalObject) and handler != NONE for handler in listed):
        return UNKNOWN_OPTIONS
    options: dict[str, Value] = {}
    for handler in listed:
        if isinstance(handler, ExternalObject) and handler.name.endswith(".DistributedDataParallelKwargs"):
            given = machine.object(handler)
            if given is None or not given.complete:
                return UNKNOWN_OPTIONS
            options |= dict(zip(PASSED_ON, given.positional, strict=False)) | dict(given.named)
    return options


def _prepared(machine: Machine, node: ast.AST, value: Value, name: str, options: Mapping[str, Value]) -> Value:
    if _is_model(machine, value, name):
        # One call wraps each of its models: each is an object of its own.
        return wrap(machine, node, Arguments((value,), options), number=machine.object_number((node, name)))
    if isinstance(value, OneOf):
        each = (_prepared(machine, node, one, f"{name} {n}", options) for n, one in enumerate(value.options))
        return reduce(lambda one, other: join(one, other, value.varying), each)
    machine.prepared.update(one.number for one in options_of(value) if isinstance(one, ExternalObject))
    return value


def _is_model(machine: Machine, value: Value, name: str) -> bool:
    if isinstance(value, Instance):
        if base_names(machine, value.cls) == ("torch.nn.Module",) and _has_parameters(machine, value, 0):
            return True  # Accelerate leaves a module alone that has nothing to train.
        return _MODEL_NAME.search(name) is not None or _MODEL_NAME.search(value.cls.node.name) is not None
    if isinstance(value, ExternalObject):
        unread = _MODEL_NAME.search(name) is not None and not value.name.startswith("torch.")
        return value.name != DDP and (unread or MODULE.search(value.name) is not None)
    unread = isinstance(value, (Unknown, External, OneOf))
    return unread and _MODEL_NAME.search(name) is not None


def _has_parameters(machine: Machine, module: Instance, depth: int) -> bool:
    """Return whether a module of the project certainly holds parameters: in a part that is one of torch's."""
    for name in machine.store.names(module.number):
        held = machine.store.get(module.number, name)
        for option in options_of(held) if held is not None else ():
            if isinstance(option, ExternalObject) and option.name.startswith("torch.nn."):
                return True
            if isinstance(option, Instance) and depth < DEEPEST and _has_parameters(machine, option, depth + 1):
                return True
    return False


# Fabric.

_OTHER_STRATEGIES = ("fsdp", "deepspeed", "dp", "xla", "singledevice", "modelparallel")
_OF_FABRIC = frozenset({"launch", "setup", "setup_module", "setup_dataloaders", "setup_optimizers"})


def _of_fabric(machine: Machine, node: ast.AST, receiver: ExternalObject, name: str, given: Arguments) -> Value | None:
    if name not in _OF_FABRIC:
        return None
    if name == "launch":
        function = given.value("function", 0) or NONE
        options = {key: value for key, value in given.named.items() if key != "function"}
        arguments = Arguments([receiver, *given.positional[1:]], options)
        return NONE if function == NONE else machine.apply(node, function, arguments)
    if name == "setup_dataloaders":
        divides = constant(given.named.get("use_distributed_sampler", Const(True))) is not False
        loaders = enumerate(given.positional)
        return _one_or_all([prepared_loader(machine, node, one, str(n)) if divides else one for n, one in loaders])
    if name == "setup_optimizers" or not given.positional:
        return _one_or_all(given.positional)
    return _one_or_all([_wrapped(machine, node, receiver, given.positional[0]), *given.positional[1:]])


def _one_or_all(values: Sequence[Value]) -> Value:
    return values[0] if len(values) == 1 else SequenceValue(tuple(values)) if values else OPAQUE


def _wrapped(machine: Machine, node: ast.AST, fabric: ExternalObject, model: Value) -> Value:
    """Return the model as the Fabric's strategy wraps it: in DDP, unless it is made with another one.

    What a Fabric gives back has the attributes of the model, too.
    """
    made = machine.object(fabric)
    strategy = made.named.get("strategy", NONE) if made is not None else NONE
    if all(map(_is_other, options_of(strategy))):
        return Unknown(opaque=True)
    if all(isinstance(option, ExternalObject) and option.name == fabric.name for option in options_of(model)):
        return model
    number = machine.object_number((node, "setup"))
    machine.handing_on.add(number)
    return wrap(machine, node, Arguments((model,), options_of_ddp(machine, strategy)), number=number)


def _is_other(strategy: Value) -> bool:
    name = strategy.name if isinstance(strategy, ExternalObject) else constant(strategy)
    last = name.lower().rpartition(".")[2].replace("_", "") if isinstance(name, str) else ""
    return last.startswith(_OTHER_STRATEGIES)


# Ignite.

_PLACES = ("ignite.distributed", "ignite.distributed.auto", "ignite.distributed.launcher")
PARALLEL = frozenset(f"{place}.Parallel" for place in _PLACES)


def auto_model(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Wrap a model in DDP, with what is given beside it."""
    options = {name: value for name, value in given.named.items() if name not in ("model", "sync_bn")}
    return wrap(machine, node, Arguments((given.value("model", 0) or UNIFORM,), options, given.complete))


def auto_loader(machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Make a loader with a sampler for the ranks."""
    number = machine.object_number(node)
    machine.emit("loader", DATA_LOADER, node, given, number=number)
    return prepared_loader(machine, node, ExternalObject(number, DATA_LOADER), "auto")


def _of_parallel(
    machine: Machine, node: ast.AST, receiver: ExternalObject, name: str, given: Arguments
) -> Value | None:
    """Do ``Parallel.run(function, …)``, which calls the function with the local rank first."""
    runs = name == "run" and given.positional and isinstance(given.positional[0], (Function, Partial))
    if not runs or receiver.name not in PARALLEL:
        return None
    machine.emit("collective", "init_process_group", node, in_tree=True)
    function, *rest = given.positional
    return machine.apply(node, function, Arguments([exact_per_rank(LOCAL_RANK), *rest], given.named))


_AUTO: Mapping[str, Callable[[Machine, ast.AST, Arguments], Value]] = {
    "auto_model": auto_model,
    "auto_dataloader": auto_loader,
    "auto_optim": lambda machine, node, given: given.value("optimizer", 0) or UNIFORM,  # Of torch's ranks as it was.
}
CALLS = {f"{place}.{name}": handler for place in _PLACES[:2] for name, handler in _AUTO.items()}
"""Functions by their full names."""
