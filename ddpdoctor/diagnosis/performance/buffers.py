"""Buffers that DDP broadcasts in every training forward although that changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import median_low

import msgspec

from ddpdoctor.diagnosis.divergence.unused_parameters import folded
from ddpdoctor.diagnosis.wording import bytes_text, place, site_location
from ddpdoctor.finding import Frame, Location
from ddpdoctor.record.model import RunRecord, TensorInfo, Wrap

_OF_FRAMEWORKS = (
    "Disable it in the framework that wraps the model (ddp_broadcast_buffers=False for the Trainer, "
    "broadcast_buffers=False for DDPStrategy and DistributedDataParallelKwargs)"
)
FORWARDS_NEEDED = 2
"""Synchronised training forwards that must have been seen on every rank."""


class WastedBroadcasts(msgspec.Struct, frozen=True, kw_only=True):
    """The buffers of one wrap whose broadcast in forward changes nothing."""

    sentence: str
    remedy: str
    location: Location | None
    """The line that made the wrap."""
    names: tuple[str, ...]
    """Folded names of the wasted buffers."""
    buffers: int
    wasted_bytes: int
    """Bytes that are broadcast for nothing in each step."""
    broadcasts_per_step: int
    needed_buffers: int
    """Buffers whose broadcast is needed, because the ranks' values differ, or may differ for all that is known."""
    forwards: int
    ranks: int


def wasted_broadcasts(record: RunRecord) -> Iterator[WastedBroadcasts]:
    """Yield the wraps with buffers that were equal on all ranks before each broadcast.

    Buffers that change in the same way everywhere count only when the ranks' inputs differ and nothing but training
    came between two forwards: on equal inputs, or after a validation that broadcasts them, equal running statistics
    prove nothing.
    """
    for number in sorted({wrap.wrap for wrap in record.wraps}):
        wraps = {wrap.rank: wrap for wrap in record.wraps if wrap.wrap == number}
        if len(wraps) < 2 or sorted(wraps) != list(record.rank_numbers()):
            continue
        if all(_synchronises(wrap) for wrap in wraps.values()) and _broadcasts(record, wraps):
            waste = _waste(record, number, wraps)
            if waste is not None:
                yield waste


def _synchronises(wrap: Wrap) -> bool:
    return bool(wrap.options.get("broadcast_buffers", True)) and wrap.options.get("forward_sync_buffers") is not False


def _broadcasts(record: RunRecord, wraps: Mapping[int, Wrap]) -> int:
    """Broadcasts of buffers in a usual training step of the first rank; 1 where that was not recorded.

    The broadcasts of 32-bit indices when DDP rebuilds its buckets are not of buffers.
    """
    rank = min(wraps)
    track = record.track(rank)
    if track is None or record.stream("collectives").state != "complete":
        return 1
    types = {buffer.dtype for buffer in wraps[rank].buffers}
    counted = [
        entry.kind == "broadcast" and entry.origin == "ddp-forward" and (entry.dtype != "int32" or entry.dtype in types)
        for entry in record.signatures
    ]
    by_step: dict[int, int] = {}
    for signature, step in zip(track.signature, track.step, strict=False):
        if counted[signature]:
            by_step[step] = by_step.get(step, 0) + 1
    return median_low(by_step.values()) if by_step else 0


def _waste(record: RunRecord, number: int, wraps: Mapping[int, Wrap]) -> WastedBroadcasts | None:
    states: dict[int, dict[int, Mapping[str, str]]] = {}
    for entry in record.buffers:
        if entry.wrap == number:
            states.setdefault(entry.forward, {})[entry.rank] = entry.digests
    common = [by_rank for _, by_rank in sorted(states.items()) if len(by_rank) == len(wraps)]
    if len(common) < FORWARDS_NEEDED:
        return None
    inputs_differ = _inputs_differ(record, number) and _trained_twice_in_a_row(record, number, min(wraps))
    buffers = wraps[min(wraps)].buffers
    wasted, needed = [], []
    for buffer in buffers:
        values = [{digests.get(buffer.name, "") for digests in by_rank.values()} for by_rank in common]
        if any("" in found for found in values):
            continue
        equal = all(len(found) == 1 for found in values)
        constant = len(set.union(*values)) == 1
        if equal and (constant or inputs_differ or _counts(buffer)):
            wasted.append(buffer)
        else:
            needed.append(buffer)
    size = sum(buffer.size_bytes for buffer in wasted)
    if not size:
        return None
    names = folded(buffer.name for buffer in wasted)
    per_step = _broadcasts(record, wraps)
    name = wraps[min(wraps)].module_class or "the model"
    location = site_location(record.site(wraps[min(wraps)].site))
    return WastedBroadcasts(
        sentence=(
            f"{bytes_text(size)} of buffers of {name} are broadcast in every step and are already the same on "
            f"all ranks: {', '.join(names)}"
        ),
        remedy=_remedy(record.job.torch_version, location, bool(needed), by_user=wraps[min(wraps)].by_user),
        location=location,
        names=names,
        buffers=len(wasted),
        wasted_bytes=size,
        broadcasts_per_step=per_step,
        needed_buffers=len(needed),
        forwards=len(common),
        ranks=len(wraps),
    )


def _counts(buffer: TensorInfo) -> bool:
    """Return whether a buffer is a counter such as BatchNorm's ``num_batches_tracked``: it advances alike
    everywhere.
    """
    return not buffer.shape and "int" in buffer.dtype


def _trained_twice_in_a_row(record: RunRecord, number: int, rank: int) -> bool:
    """Return whether a rank's training forwards ever followed each other: an evaluation between them broadcasts too."""
    own = [forward for forward in record.forwards if (forward.wrap, forward.rank) == (number, rank)]
    return any(one.gradients and one.training and other.gradients and other.training for one, other in pairwise(own))


def _inputs_differ(record: RunRecord, number: int) -> bool:
    by_rank: dict[int, list[str]] = {}
    for forward in record.forwards:
        if forward.wrap == number and forward.synchronised and forward.training and forward.input_digest:
            by_rank.setdefault(forward.rank, []).append(forward.input_digest)
    steps = list(zip(*by_rank.values(), strict=False)) if len(by_rank) > 1 else []
    return bool(steps) and all(len(set(step)) > 1 for step in steps)


def _remedy(torch_version: str, location: Location | None, needed: bool, *, by_user: bool) -> str:
    option = "forward_sync_buffers=False" if _at_least(torch_version, (2, 13)) else "broadcast_buffers=False"
    where = "" if location is None else f" at {place(Frame(location.file, location.line))}"
    text = f"Pass {option} to DistributedDataParallel{where}" if by_user else _OF_FRAMEWORKS
    if needed:
        return (
            f"{text} if the buffers that differ between ranks may stay different (SyncBatchNorm makes running "
            "statistics agree), or turn constant buffers into plain attributes."
        )
    return f"{text}: the buffers keep their values, and the broadcast is saved."


def _at_least(version: str, wanted: tuple[int, int]) -> bool:
    numbers = []
    for part in version.split("+")[0].split(".")[:2]:
        digits = "".join(character for character in part if character.isdigit())
        numbers.append(int(digits or 0))
    return tuple(numbers) >= wanted
