"""Environment variables as a launcher sets them for each rank."""

from __future__ import annotations

from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import OPAQUE, UNIFORM, Const, Lanes, Unknown, Value
from ddpdoctor.source.ranks.ranks import GLOBAL_RANK, LOCAL_RANK, NODE_RANK, exact_lanes
from ddpdoctor.source.vocabulary import (
    GLOBAL_RANK_VARIABLES,
    LAUNCHER_VARIABLES,
    LOCAL_RANK_VARIABLES,
    LOCAL_WORLD_SIZE_VARIABLES,
    NODE_RANK_VARIABLES,
    WORLD_SIZE_VARIABLES,
)

WORLD_SIZE = Unknown(tags=frozenset({("world-size", 0)}))
LOCAL_WORLD_SIZE = Unknown(tags=frozenset({("local-world-size", 0)}))
DEVICE_COUNT = Unknown(tags=frozenset({("device-count", 0)}))


def variable(machine: Machine, name: object) -> Value:
    """The value of an environment variable on every rank, as text.

    A script that spawns its ranks runs without a launcher: what it reads there is the same for all of them.
    """
    if machine.spawns:
        return UNIFORM
    if name in GLOBAL_RANK_VARIABLES:
        return _text(GLOBAL_RANK)
    if name in LOCAL_RANK_VARIABLES:
        return _text(LOCAL_RANK)
    if name in NODE_RANK_VARIABLES:
        return _text(NODE_RANK)
    if name in WORLD_SIZE_VARIABLES:
        return WORLD_SIZE
    if name in LOCAL_WORLD_SIZE_VARIABLES:
        return LOCAL_WORLD_SIZE
    if name in {"HOSTNAME", "CUDA_VISIBLE_DEVICES", "SLURMD_NODENAME"}:
        return Unknown(varying=True)
    return UNIFORM if isinstance(name, str) else OPAQUE


def is_set(machine: Machine, name: object) -> Value:
    """Whether a variable is in the environment of a rank."""
    if not machine.spawns and name in LAUNCHER_VARIABLES and not str(name).startswith(("SLURM", "OMPI", "PMI", "MPI")):
        return Const(True)
    return UNIFORM


def _text(numbers: tuple[int, ...]) -> Lanes:
    return exact_lanes(tuple(str(number) for number in numbers))
