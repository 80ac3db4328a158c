"""The attributes of an ``accelerate.Accelerator`` that tell ranks apart."""

from __future__ import annotations

from collections.abc import Mapping

from ddpdoctor.source.interpreter.values import Const, ExternalObject, Value
from ddpdoctor.source.ranks.ranks import FIRST, GLOBAL_RANK, LOCAL_RANK, WORLD_SIZE, exact_per_rank

ACCELERATOR = "accelerate.Accelerator"
_STATES = frozenset({ACCELERATOR, "accelerate.PartialState", "accelerate.state.PartialState"})
_ATTRIBUTES: Mapping[str, Value] = {
    "is_main_process": exact_per_rank(FIRST),
    "is_local_main_process": exact_per_rank(tuple(local == 0 for local in LOCAL_RANK)),
    "is_last_process": exact_per_rank(tuple(rank == GLOBAL_RANK[-1] for rank in GLOBAL_RANK)),
    "process_index": exact_per_rank(GLOBAL_RANK),
    "local_process_index": exact_per_rank(LOCAL_RANK),
    "num_processes": WORLD_SIZE,
    "use_distributed": Const(True),
}


def attribute(value: ExternalObject, name: str) -> Value | None:
    """An attribute of an Accelerator, as the four ranks have it; None for one that tells no rank."""
    return _ATTRIBUTES.get(name) if value.name in _STATES else None
