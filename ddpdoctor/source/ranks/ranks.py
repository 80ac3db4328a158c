"""The numbers of the imagined ranks, and the environment that holds them."""

from __future__ import annotations

from ddpdoctor.source.interpreter.scopes import Store
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import OPAQUE, RANKS, TASK_COUNT, UNIFORM, Const, PerRank, Unknown, Value
from ddpdoctor.source.vocabulary import (
    GLOBAL_RANK_VARIABLES,
    LAUNCHER_VARIABLES,
    LOCAL_RANK_VARIABLES,
    LOCAL_WORLD_SIZE_VARIABLES,
    NODE_RANK_VARIABLES,
    RANK_NAMES,
    TASK_COUNT_VARIABLES,
    WORLD_SIZE_VARIABLES,
)

GLOBAL_RANK = (0, 1, 2, 3)
LOCAL_RANK = (0, 1, 0, 1)
NODE_RANK = (0, 0, 1, 1)
FIRST = (True, False, False, False)
FIRST_RANKS = frozenset({0b0001, 0b0101})
"""Masks of the first rank of the job and of the first rank of each node."""


def exact_per_rank(values: tuple[object, ...]) -> PerRank:
    """Return a value whose variation is known from its origin."""
    return PerRank(tuple(Const(value) for value in values))


def guessed_per_rank(values: tuple[object, ...]) -> PerRank:
    """Return a value whose variation is read from a name."""
    return PerRank(tuple(Const(value) for value in values), guessed=True)


def numbers_in(mask: int) -> tuple[int, ...]:
    """Return the ranks of a mask, ascending."""
    return tuple(rank for rank in RANKS if mask >> rank & 1)


def ranks_text(mask: int) -> str:
    """Name the ranks of a mask: ``rank 0``, ``all ranks but 0``, ``ranks 0 and 2``.

    The four imagined ranks stand for any number: what all but one do is said without counting them.
    """
    ranks = numbers_in(mask)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) == len(RANKS):
        return "all ranks"
    if len(ranks) == len(RANKS) - 1:
        return f"all ranks but {next(rank for rank in RANKS if rank not in ranks)}"
    return "ranks " + ", ".join(str(rank) for rank in ranks[:-1]) + f" and {ranks[-1]}"


WORLD_SIZE = Unknown(tags=frozenset({("world-size", 0)}))
LOCAL_WORLD_SIZE = Unknown(tags=frozenset({("local-world-size", 0)}))
_TASKS = Unknown(tags=frozenset({TASK_COUNT}))
DEVICE_COUNT = Unknown(tags=frozenset({("device-count", 0)}))


def variable(machine: Machine, name: object) -> Value:
    """Return the value of an environment variable on every rank, as text.

    A script that spawns its ranks runs without a launcher, or as one task on each node: what it reads there is the same
    for all of them, and counts the tasks.
    """
    if machine.spawns:
        return _TASKS if name in TASK_COUNT_VARIABLES else UNIFORM
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
    """Return whether a variable is in the environment of a rank."""
    if not machine.spawns and name in LAUNCHER_VARIABLES and not str(name).startswith(("SLURM", "OMPI", "PMI", "MPI")):
        return Const(True)
    return UNIFORM


def _text(numbers: tuple[int, ...]) -> PerRank:
    return exact_per_rank(tuple(str(number) for number in numbers))


# The names under which a script keeps its ranks and their number, by the values that the walk found in them.

# Names of torch, of launchers and of Accelerate for the number of ranks.
_ASKING_SIZE = frozenset({"get_world_size", "world_size", "WORLD_SIZE", "device_count", "num_processes"})
_ASKING_RANK = RANK_NAMES | {"get_rank", "RANK"}


def size_names(store: Store) -> frozenset[str]:
    """Return the names that hold a number of ranks, or ask for it."""
    return _ASKING_SIZE | store.size_names


def rank_names(store: Store) -> frozenset[str]:
    """Return the names that hold a rank, or ask for it."""
    return _ASKING_RANK | store.rank_names
