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


def gpus_for_the_ranks(record: RunRecord) -> int:
    """Return how many GPUs ranks that were denied one need, at one each; 0 where none was denied one.

    An index beyond the ranks of the node is a mistake of the script. A spawned process that has not joined yet is no
    rank, and the index is all that is known of it.
    """
    denied = (_NO_SUCH_GPU.search(one.message) for one in record.job.early_exceptions)
    early = max((int(match[1]) + 1 for match in denied if match), default=0)
    if any(_NO_SUCH_GPU.search(one.message) for rank in record.ranks for one in rank.exceptions):
        return max(early, record.job.world_size, len(record.ranks))
    return early


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
