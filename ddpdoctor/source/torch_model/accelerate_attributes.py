"""The attributes of an ``accelerate.Accelerator`` that tell ranks apart."""

from __future__ import annotations

from collections.abc import Mapping

from ddpdoctor.source.interpreter.values import Built, Const, Value
from ddpdoctor.source.ranks.ranks import FIRST, GLOBAL_RANK, LOCAL_RANK, WORLD_SIZE, exact_lanes

ACCELERATOR = "accelerate.Accelerator"
_STATES = frozenset({ACCELERATOR, "accelerate.PartialState", "accelerate.state.PartialState"})
_ATTRIBUTES: Mapping[str, Value] = {
    "is_main_process": exact_lanes(FIRST),
    "is_local_main_process": exact_lanes(tuple(local == 0 for local in LOCAL_RANK)),
    "is_last_process": exact_lanes(tuple(rank == GLOBAL_RANK[-1] for rank in GLOBAL_RANK)),
    "process_index": exact_lanes(GLOBAL_RANK),
    "local_process_index": exact_lanes(LOCAL_RANK),
    "num_processes": WORLD_SIZE,
    "use_distributed": Const(True),
}


def attribute(value: Built, name: str) -> Value | None:
    """An attribute of an Accelerator, as the four ranks have it; None for one that tells no rank."""
    return _ATTRIBUTES.get(name) if value.name in _STATES else None
