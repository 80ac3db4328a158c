"""What Lightning's ``Fabric`` does: it starts ranks, wraps models, divides loaders, and runs their backward."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    NONE,
    OPAQUE,
    Arguments,
    Const,
    ExternalObject,
    SequenceValue,
    Unknown,
    Value,
    constant,
    options_of,
)
from ddpdoctor.source.libraries.lightning import options_of_ddp
from ddpdoctor.source.libraries.rank_attributes import prepared_loader
from ddpdoctor.source.torch_model.ddp import wrap
from ddpdoctor.source.vocabulary import FABRICS

_OTHER_STRATEGIES = ("fsdp", "deepspeed", "dp", "xla", "singledevice", "modelparallel")
METHODS = frozenset({"launch", "setup", "setup_module", "setup_dataloaders", "setup_optimizers"})


def method(machine: Machine, node: ast.AST, receiver: Value, name: str, given: Arguments) -> Value | None:
    """Do a method of a Fabric, and return its result; None for one like any other."""
    if not isinstance(receiver, ExternalObject) or receiver.name not in FABRICS or name not in METHODS:
        return None
    if name == "launch":
        function = given.value("function", 0) or NONE
        options = {key: value for key, value in given.named.items() if key != "function"}
        arguments = Arguments([receiver, *given.positional[1:]], options)
        return NONE if function == NONE else machine.apply(machine, node, function, arguments)
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
