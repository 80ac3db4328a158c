"""What the link between the GPUs of a process group should carry, by what their driver says of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.measured import Gpu

_PAIRS_ONLY = ("PCIE", "NVL")
"""Names of GPUs whose NVLinks, where they have any, are bridges between two or four cards."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The slowest link of a ring through the GPUs of a group."""

    kind: Literal["NVLink", "PCIe"]
    bytes_per_s: float
    """In one direction, by its standard; a well-tuned ring reaches 70 to 90 % of it."""


def link_of(record: RunRecord, ranks: Collection[int]) -> Link | None:
    """The link of a group of ranks.

    None where it is not known: ranks without a GPU of their own that this node's driver knows, as on several nodes, and
    backends that do not send from GPU to GPU.
    """
    backends = {group.backend for group in record.groups if group.ranks == tuple(sorted(ranks))} or {record.job.backend}
    gpus = [gpu for gpu in record.gpus if not set(gpu.ranks).isdisjoint(ranks)]
    known = {rank for gpu in gpus for rank in gpu.ranks}
    if len(gpus) < 2 or len(gpus) != len(set(ranks)) or not known.issuperset(ranks):
        return None
    if not all("nccl" in backend for backend in backends):
        return None
    nvlinks = [gpu.nvlink_bytes_per_s for gpu in gpus if gpu.nvlink_bytes_per_s is not None]
    if len(nvlinks) == len(gpus) and (len(gpus) == 2 or not _in_pairs(gpus)):
        return Link(kind="NVLink", bytes_per_s=min(nvlinks))
    lanes = [gpu.pcie_bytes_per_s for gpu in gpus if gpu.pcie_bytes_per_s is not None]
    return Link(kind="PCIe", bytes_per_s=min(lanes)) if len(lanes) == len(gpus) else None


def _in_pairs(gpus: Sequence[Gpu]) -> bool:
    return any(word in gpu.name.upper() for gpu in gpus for word in _PAIRS_ONLY)
