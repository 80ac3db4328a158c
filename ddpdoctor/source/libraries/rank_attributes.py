"""The attributes of an ``Accelerator``, ``Fabric``, ``Trainer``, DeepSpeed engine and of bars that separate ranks."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    BAR,
    BAR_COUNT,
    RANKS,
    Arguments,
    Const,
    ExternalObject,
    PerRank,
    Unknown,
    Value,
    constant,
    on_rank,
    options_of,
    per_rank,
)
from ddpdoctor.source.ranks.ranks import FIRST, GLOBAL_RANK, LOCAL_RANK, NODE_RANK, WORLD_SIZE, exact_per_rank
from ddpdoctor.source.vocabulary import ACCELERATE_STATES, DATA_LOADER, ENGINE, FABRICS

ACCELERATOR = "accelerate.Accelerator"
_STATES = ACCELERATE_STATES | {ACCELERATOR}
TRAINERS = frozenset(f"{package}.Trainer" for package in ("lightning", "lightning.pytorch", "pytorch_lightning"))
HELPERS = TRAINERS | FABRICS | {ACCELERATOR}
"""Classes that a project may derive from: what it leaves alone is the library's own."""
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
    given = Arguments(made.positional, made.named)
    machine.emit("loader", DATA_LOADER, made.node, given, number=number, receiver=value)
    return ExternalObject(number, DATA_LOADER)


# Bars of tqdm: one that is off counts nothing. Those of rich, enlighten and alive_progress count though they are off.

_ON_OTHERS = exact_per_rank(tuple(local != 0 for local in LOCAL_RANK))


def make_bar(name: str, make: Callable[..., Value], machine: Machine, node: ast.AST, given: Arguments) -> Value:
    """Return the items that a bar goes over, marked where some ranks alone have it on."""
    result, named = make(machine, node, given), given.named
    by_default = name.startswith("accelerate.") and constant(named.get("main_process_only", Const(True))) is True
    off = _ON_OTHERS if by_default else named.get("disable")
    if (
        not isinstance(off, PerRank)
        or {type(lane) for lane in off.values} != {Const}
        or not isinstance(result, Unknown)
    ):
        return result
    number = machine.object_number((node, BAR))
    machine.emit("object", "tqdm.tqdm", node, Arguments(given.positional, {**named, "disable": off}), number=number)
    return Unknown(result.varying, result.opaque, result.tags | {(BAR, number)}, result.not_none)


def count_of(machine: Machine, bar: Unknown) -> Value | None:
    """Return how far a marked bar has counted: nowhere where it is off; None if the script sets it."""
    made = next((machine.events.get(number) for kind, number in bar.tags if kind == BAR), None)
    attributes = (node for module in machine.script.modules for node in module.index.of(ast.Attribute))
    if made is None or any(node.attr == "n" and isinstance(node.ctx, ast.Store) for node in attributes):
        return None
    off, start = made.named["disable"], made.named.get("initial", Const(0))
    counted = Unknown(tags=frozenset({(BAR_COUNT, made.location.line)}))
    lanes = [on_rank(start, rank) if constant(on_rank(off, rank)) else counted for rank in RANKS]
    return per_rank(lanes, isinstance(off, PerRank) and off.guessed)
