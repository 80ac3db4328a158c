"""The attributes of an ``Accelerator``, a ``Fabric``, a ``Trainer`` and DeepSpeed's engine that separate ranks."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import Const, ExternalObject, Value, options_of
from ddpdoctor.source.ranks.ranks import FIRST, GLOBAL_RANK, LOCAL_RANK, NODE_RANK, WORLD_SIZE, exact_per_rank
from ddpdoctor.source.vocabulary import ACCELERATE_STATES, DATA_LOADER, ENGINE, FABRICS

ACCELERATOR = "accelerate.Accelerator"
_STATES = ACCELERATE_STATES | {ACCELERATOR}
TRAINERS = frozenset(f"{package}.Trainer" for package in ("lightning", "lightning.pytorch", "pytorch_lightning"))
_WITH_RANKS = TRAINERS | FABRICS | {ENGINE}
_ATTRIBUTES: Mapping[str, Value] = {
    "is_main_process": exact_per_rank(FIRST),
    "is_local_main_process": exact_per_rank(tuple(local == 0 for local in LOCAL_RANK)),
    "is_last_process": exact_per_rank(tuple(rank == GLOBAL_RANK[-1] for rank in GLOBAL_RANK)),
    "process_index": exact_per_rank(GLOBAL_RANK),
    "local_process_index": exact_per_rank(LOCAL_RANK),
    "num_processes": WORLD_SIZE,
    "use_distributed": Const(True),
}

_OF_TRAINER: Mapping[str, Value] = {
    "is_global_zero": exact_per_rank(FIRST),
    "global_rank": exact_per_rank(GLOBAL_RANK),
    "local_rank": exact_per_rank(LOCAL_RANK),
    "node_rank": exact_per_rank(NODE_RANK),
    "world_size": WORLD_SIZE,
}


def attribute(value: ExternalObject, name: str) -> Value | None:
    """Return an attribute of one of these, as the four ranks have it; None for one that depends on no rank."""
    known = _ATTRIBUTES if value.name in _STATES else _OF_TRAINER if value.name in _WITH_RANKS else None
    return None if known is None else known.get(name)


# Loaders that a framework takes and gives back divided between the ranks.


def is_loader(value: Value) -> bool:
    """Return whether a value may be a loader."""
    return any(isinstance(option, ExternalObject) and option.name == DATA_LOADER for option in options_of(value))


def prepared_loader(machine: Machine, node: ast.AST, value: Value, name: str) -> Value:
    """Return what a framework makes of a loader, an object of its own that is divided; another value as it is."""
    made = machine.object(next(options_of(value))) if is_loader(value) else None
    if made is None:
        return value
    number = machine.object_number((node, name))
    machine.prepared.add(number)
    machine.emit("loader", DATA_LOADER, made.node, made.positional, made.named, number=number, receiver=value)
    return ExternalObject(number, DATA_LOADER)
