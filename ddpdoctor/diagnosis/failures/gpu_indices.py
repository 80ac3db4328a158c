"""Ranks that took their global rank for the index of a GPU, as a layout of several nodes shows."""

from __future__ import annotations

import re

import msgspec

from ddpdoctor.diagnosis.wording import location_of
from ddpdoctor.finding import Frame, Location
from ddpdoctor.record.model import Rank, RankException, RunRecord

_NO_SUCH_GPU = re.compile(
    r"invalid device ordinal\s*\(device (\d+) was asked for; the node of this rehearsal has (\d+)\)"
)
"""What the stand-in says of a GPU that the node lacks; CUDA does not tell the index."""


class WrongIndex(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that asked its node for the GPU of its global rank."""

    rank: int
    local_rank: int
    node: int
    gpus: int
    """GPUs of the node."""
    location: Location | None
    frames: tuple[Frame, ...]


def asks_for_global_rank(rank: Rank, raised: RankException) -> bool:
    """Return whether an exception came of the global rank as the index of a GPU."""
    match = _NO_SUCH_GPU.search(raised.message)
    return match is not None and int(match[1]) == rank.rank != rank.local_rank


def highest_gpu_asked_for(record: RunRecord) -> int:
    """Return the highest index of a GPU that the node lacks and that no rank took its global rank for; -1 for none."""
    raised = [one for rank in record.ranks for one in rank.exceptions if not asks_for_global_rank(rank, one)]
    matches = (_NO_SUCH_GPU.search(one.message) for one in (*record.job.early_exceptions, *raised))
    return max((int(match[1]) for match in matches if match), default=-1)


def gpus_of_the_node(raised: RankException) -> int | None:
    """Return how many GPUs the pretended node has, where an exception came of asking for more."""
    match = _NO_SUCH_GPU.search(raised.message)
    return None if match is None else int(match[2])


def wrong_index(record: RunRecord) -> WrongIndex | None:
    """Return the first rank that asked for a GPU by its global rank."""
    for rank in record.ranks:
        for raised in rank.exceptions:
            match = _NO_SUCH_GPU.search(raised.message)
            if match is not None and asks_for_global_rank(rank, raised):
                return WrongIndex(
                    rank=rank.rank,
                    local_rank=rank.local_rank,
                    node=rank.node,
                    gpus=int(match[2]),
                    location=location_of(raised.frames[0]) if raised.frames else None,
                    frames=raised.frames,
                )
    return None
