"""Wraps and optimizer steps as all ranks of a replica saw them, and what differed between the ranks around a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from ddpdoctor.diagnosis.divergence.divergence import find_divergence
from ddpdoctor.diagnosis.divergence.unused_parameters import waits_in_vain
from ddpdoctor.record.model import RunRecord, Wrap
from ddpdoctor.record.streams.training import Backward, OptimizerStep, StepDigest

NO_WRAP = -1
"""Stands for parameters of no wrapped module."""
_SPOILS_GRADIENTS = ("mismatch", "desync", "crossed", "swapped")


class ReplicaStep(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step on the ranks that should hold the same model."""

    wrap: int
    optimizer: int
    ordinal: int
    """n-th step of the optimizer, from 1; 0 is the moment before the first."""
    steps: Mapping[int, OptimizerStep]
    """By rank; empty for the moment before the first."""
    compared: int
    """Tensors that could be compared."""
    unequal: tuple[str, ...]
    """Names of those that differ between ranks."""


def replicated_wraps(record: RunRecord) -> Iterator[dict[int, Wrap]]:
    """Yield each wrap of two or more ranks by rank, where every rank of its group made it."""
    for number in sorted({wrap.wrap for wrap in record.wraps}):
        by_rank = {wrap.rank: wrap for wrap in record.wraps if wrap.wrap == number}
        # Of thousands of ranks each names them all: the same object is compared once.
        groups = set({id(wrap.ranks): wrap.ranks or record.rank_numbers() for wrap in by_rank.values()}.values())
        for group in sorted(groups):
            members = {rank: by_rank[rank] for rank in group if rank in by_rank}
            if len(group) > 1 and len(members) == len(group):
                yield members


def judged_wraps(record: RunRecord) -> Iterator[dict[int, Wrap]]:
    """Yield the wraps of ``replicated_wraps`` whose reductions DDP made by itself and could finish.

    None where ranks paired collectives that do not belong together: what differs then has that one cause.
    """
    divergence = find_divergence(record)
    if divergence is not None and divergence.form in _SPOILS_GRADIENTS:
        return
    for wraps in replicated_wraps(record):
        number = wraps[min(wraps)].wrap
        if not any(wrap.communication_hook for wrap in wraps.values()) and not waits_in_vain(record, number):
            yield wraps


def gradients_around_steps(record: RunRecord, wrap: int, ranks: tuple[int, ...]) -> Iterator[ReplicaStep]:
    """Yield what the ranks' gradients were before each step that every one of them made."""
    yield from _compared(record, record.gradient_digests, wrap, ranks)


def parameters_around_steps(record: RunRecord, wrap: int, ranks: tuple[int, ...]) -> Iterator[ReplicaStep]:
    """Yield what the ranks' parameters were before the first step, and after each that every one of them made."""
    yield from _compared(record, record.parameter_digests, wrap, ranks)


def contributions(record: RunRecord, step: OptimizerStep, wrap: int) -> tuple[Backward, ...]:
    """Return the backwards whose gradients a step uses, in order of time: those since the gradients were cleared."""
    found: list[Backward] = []
    for backward in reversed(record.backwards):
        if backward.rank == step.rank and backward.time_ns < step.time_ns and wrap in backward.wraps:
            found.append(backward)
            if wrap not in backward.accumulated:
                break
    return tuple(reversed(found))


def follows_a_cut(record: RunRecord, step: OptimizerStep, last_ns: int) -> bool:
    """Return whether a pass was cut by the rehearsal after the time given, and before the step."""
    return any(
        entry.rank == step.rank and entry.end in ("cut", "counted") and last_ns < entry.ended_ns < step.time_ns
        for entry in record.passes
    )


def averaged_by_hand(record: RunRecord, rank: int, elements: int) -> bool:
    """Return whether the user's collectives moved as much as half of so many elements in a training step of a rank."""
    track = record.track(rank)
    if track is None or not elements:
        return False
    times = sorted(step.time_ns for step in record.optimizer_steps if step.rank == rank)
    if not times:
        return False
    moved: dict[int, int] = {}
    for signature, started_ns in zip(track.signature, track.started_ns, strict=True):
        entry = record.signatures[signature]
        if entry.origin == "user" and entry.kind != "barrier":
            interval = sum(time_ns <= started_ns for time_ns in times)
            moved[interval] = moved.get(interval, 0) + sum(entry.numels)
    return any(2 * count >= elements for interval, count in moved.items() if interval)


def trained_by_hand(record: RunRecord) -> bool:
    """Return whether every rank stepped, wrapped nothing, and reduced as much as it trains by calls of the user's own.

    Scattered reductions are another wrapper's, whose state no rank holds whole.
    """
    if record.wraps or any(signature.kind.startswith("reduce_scatter") for signature in record.signatures):
        return False
    trained = dict.fromkeys(record.rank_numbers(), 0)
    for step in record.optimizer_steps:
        trained[step.rank] = max(trained.get(step.rank, 0), step.elements)
    return bool(trained) and all(averaged_by_hand(record, rank, elements) for rank, elements in trained.items())


def may_be_averaged_later(record: RunRecord) -> bool:
    """Return whether the user's files hold a call that could average a model and that no rank came to."""
    reached = {
        (frame.file, frame.line)
        for track in record.collectives
        for site in set(track.site)
        for frame in record.site(site).frames
    }
    return any(place not in reached for written in record.written_averages for place in written.places)


def _compared(
    record: RunRecord, digests: tuple[StepDigest, ...], wrap: int, ranks: tuple[int, ...]
) -> Iterator[ReplicaStep]:
    steps = {(step.optimizer, step.ordinal, step.rank): step for step in record.optimizer_steps}
    by_place: dict[tuple[int, int], dict[int, Mapping[str, str]]] = {}
    for entry in digests:
        if entry.wrap == wrap and entry.rank in ranks:
            by_place.setdefault((entry.optimizer, entry.step), {})[entry.rank] = entry.digests
    for (optimizer, ordinal), by_rank in sorted(by_place.items()):
        made = {rank: steps[optimizer, ordinal, rank] for rank in ranks if (optimizer, ordinal, rank) in steps}
        if len(by_rank) < len(ranks) or (ordinal and len(made) < len(ranks)):
            continue
        first = by_rank[min(by_rank)]
        common = [name for name in first if all(name in values for values in by_rank.values())]
        yield ReplicaStep(
            wrap=wrap,
            optimizer=optimizer,
            ordinal=ordinal,
            steps=made,
            compared=len(common),
            unequal=tuple(name for name in common if len({values[name] for values in by_rank.values()}) > 1),
        )
