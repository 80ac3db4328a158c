"""Which GPU each rank of this node uses: from the processes on the GPUs, else from what the ranks' environment shows.

``CUDA_VISIBLE_DEVICES`` names GPUs by index, by UUID or the beginning of one, or by the UUID of a MIG instance. Indices
count as ``CUDA_DEVICE_ORDER`` says: by PCI bus, as the driver does, or fastest first, which is the same order where all
GPUs are of one model and is not known where they are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from ddpdoctor.record.streams.measured import Gpu


class RankProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of this node, by what decides on its GPU."""

    rank: int
    pid: int = 0
    local_rank: int | None = None
    device: int | None = None
    """Index of its current CUDA device among those that it sees, where known."""
    visible: str | None = None
    """Its ``CUDA_VISIBLE_DEVICES``; None when that is not set."""
    order: str = ""
    """Its ``CUDA_DEVICE_ORDER``."""


def with_ranks(gpus: tuple[Gpu, ...], ranks: Iterable[RankProcess]) -> tuple[Gpu, ...]:
    """Return the GPUs with the ranks that use them; a rank with an unknown GPU is on none."""
    users: dict[int, list[int]] = {}
    for rank in ranks:
        position = _position(gpus, rank)
        if position is not None:
            users.setdefault(position, []).append(rank.rank)
    return tuple(
        msgspec.structs.replace(gpu, ranks=tuple(sorted(users.get(position, ())))) for position, gpu in enumerate(gpus)
    )


def environment_of(pid: int) -> Mapping[str, str] | None:
    """Environment that a process of this user was started with; None where it cannot be read."""
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.decode("utf-8", "replace").partition("=") for entry in content.split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


def _position(gpus: tuple[Gpu, ...], rank: RankProcess) -> int | None:
    """Position of the GPU of a rank.

    A process can hold a little memory on a GPU that is not its own, so of several that it is on the one that its
    environment names counts, and else the one that holds most.
    """
    named = _named(gpus, rank)
    held = _held(gpus, rank.pid) if rank.pid else {}
    if not held or named in held:
        return named
    return max(held, key=lambda position: held[position])


def _held(gpus: tuple[Gpu, ...], pid: int) -> dict[int, int]:
    """Bytes that a process holds, by position of the GPU."""
    newest = {position: gpu.samples[-1].processes for position, gpu in enumerate(gpus) if gpu.samples}
    return {position: size for position, processes in newest.items() for process, size in processes if process == pid}


def _named(gpus: tuple[Gpu, ...], rank: RankProcess) -> int | None:
    """Position of the GPU that a rank's environment and device index name together."""
    seen = visible_positions(gpus, rank.visible, rank.order)
    if seen is None:
        return None
    if len(seen) == 1 and rank.device in (None, 0):
        return seen[0]
    device = rank.local_rank if rank.device is None else rank.device
    return seen[device] if device is not None and 0 <= device < len(seen) else None


def visible_positions(gpus: tuple[Gpu, ...], visible: str | None, order: str) -> tuple[int, ...] | None:
    """Positions of the GPUs that a process sees, in its own order; None when that is not known.

    As in CUDA the first entry that names no GPU ends the list, and a list that names one twice shows none.
    """
    by_index = _counted(gpus, order)
    if visible is None:
        return by_index
    found: list[int] = []
    for entry in visible.split(","):
        word = entry.strip()
        if word.lstrip("+-").isdigit():
            if by_index is None:
                return None
            position = by_index[int(word)] if 0 <= int(word) < len(by_index) else None
        else:
            position = _by_uuid(gpus, word)
        if position is None:
            break
        found.append(position)
    return tuple(found) if len(set(found)) == len(found) else ()


def _counted(gpus: tuple[Gpu, ...], order: str) -> tuple[int, ...] | None:
    """Positions in the order of CUDA's indices; None when that is not known."""
    divided = any(gpu.uuid.startswith("MIG-") for gpu in gpus)
    if divided or (order != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1):
        return None
    return tuple(sorted(range(len(gpus)), key=lambda position: gpus[position].index))


def _by_uuid(gpus: tuple[Gpu, ...], word: str) -> int | None:
    """Position of the one GPU whose UUID begins so."""
    if not word.upper().startswith(("GPU-", "MIG-")):
        return None
    found = [position for position, gpu in enumerate(gpus) if gpu.uuid.lower().startswith(word.lower())]
    return found[0] if len(found) == 1 else None
