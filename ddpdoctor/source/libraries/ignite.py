"""What ``ignite.distributed`` does for ranks: it starts them, wraps models and optimizers, and divides loaders."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    UNIFORM,
    Arguments,
    BoundMethod,
    ExternalObject,
    Function,
    Partial,
    Value,
)
from ddpdoctor.source.libraries.rank_attributes import prepared_loader
from ddpdoctor.source.ranks.ranks import LOCAL_RANK, exact_per_rank
from ddpdoctor.source.torch_model.ddp import wrap
from ddpdoctor.source.vocabulary import DATA_LOADER

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


def method(machine: Machine, node: ast.AST, receiver: Value, name: str, given: Arguments) -> Value | None:
    """Do ``Parallel.run(function, …)``, which calls the function with the local rank first; None for any other."""
    made = isinstance(receiver, ExternalObject) and receiver.name in PARALLEL
    entered = isinstance(receiver, BoundMethod) and receiver.name == "__enter__"
    if (
        name != "run"
        or not (made or entered)
        or not given.positional
        or not isinstance(given.positional[0], (Function, Partial))
    ):
        return None
    machine.emit("collective", "init_process_group", node, in_tree=True)
    function, *rest = given.positional
    return machine.apply(machine, node, function, Arguments([exact_per_rank(LOCAL_RANK), *rest], given.named))


_AUTO: Mapping[str, Callable[[Machine, ast.AST, Arguments], Value]] = {
    "auto_model": auto_model,
    "auto_dataloader": auto_loader,
    "auto_optim": lambda machine, node, given: given.value("optimizer", 0) or UNIFORM,  # Of torch's ranks as it was.
}
CALLS = {f"{place}.{name}": handler for place in _PLACES[:2] for name, handler in _AUTO.items()}
"""Functions by their full names."""
