"""What an ``accelerate.Accelerator`` does for ranks: it wraps models in DDP, divides loaders and names the first."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from ddpdoctor.files import regex
from ddpdoctor.source.interpreter.attributes import base_names
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    NONE,
    OPAQUE,
    Arguments,
    External,
    ExternalObject,
    Instance,
    OneOf,
    SequenceValue,
    Unknown,
    Value,
    derived,
    options_of,
)
from ddpdoctor.source.libraries.rank_attributes import ACCELERATOR, is_loader, prepared_loader
from ddpdoctor.source.torch_model.ddp import PASSED_ON, UNKNOWN_OPTIONS, wrap
from ddpdoctor.source.vocabulary import DDP, MODULE

DEEPEST = 10
"""Modules within modules that are looked into."""
_MODEL_NAME = regex(r"model|net(work)?$|unet|encoder|decoder|generator|discriminator", re.IGNORECASE)


def method(machine: Machine, node: ast.AST, receiver: Value, name: str, given: Arguments) -> Value | None:
    """Do a method of an Accelerator, and return its result; None for one like any other."""
    if not isinstance(receiver, ExternalObject) or receiver.name != ACCELERATOR:
        return None
    if name in {"prepare", "prepare_model", "prepare_data_loader"}:
        names = [ast.unparse(argument).rpartition(".")[2] for argument in getattr(node, "args", ())]
        options = _options_of_ddp(machine, receiver)
        prepared = [
            prepared_loader(machine, node, value, str(index))
            if is_loader(value)
            else _prepared(machine, node, value, names[index] if index < len(names) else "", options)
            for index, value in enumerate(given.positional)
        ]
        return prepared[0] if len(prepared) == 1 else SequenceValue(tuple(prepared)) if prepared else OPAQUE
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
