"""The names under which a script keeps its ranks and their number, by the values that the walk found in them."""

from __future__ import annotations

from ddpdoctor.source.interpreter.scopes import Store
from ddpdoctor.source.vocabulary import RANK_NAMES

_ASKING_SIZE = frozenset({"get_world_size", "world_size", "WORLD_SIZE", "device_count", "num_processes"})
"""Names of torch, of launchers and of Accelerate for the number of ranks."""
_ASKING_RANK = RANK_NAMES | {"get_rank", "RANK"}


def size_names(store: Store) -> frozenset[str]:
    """Return the names that hold a number of ranks, or ask for it."""
    return _ASKING_SIZE | store.size_names


def rank_names(store: Store) -> frozenset[str]:
    """Return the names that hold a rank, or ask for it."""
    return _ASKING_RANK | store.rank_names
