"""In how many training steps each reduction of the user's ran; what its result is for, only the source tells."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator

import msgspec

from ddpdoctor.checks.collectives.barrier_in_hot_loop.run import FEWEST_STEPS
from ddpdoctor.diagnosis.wording import bytes_text, count, location_of
from ddpdoctor.finding import Confirmed, Fact, Frame, Refuted
from ddpdoctor.record.model import RunRecord

_REDUCTIONS = frozenset({"all_reduce", "reduce"})
RARELY = 0.5
"""Share of the steps up to which it is not run in every step, whatever the source looks like."""


class _Counted(msgspec.Struct, frozen=True, kw_only=True):
    """How often a rank ran a line after the backwards of one call chain: a step may have several forwards."""

    calls: int
    ran: int
    """Backwards that it followed."""
    steps: int
    """All of them."""
    size_bytes: int
    """Of the largest call."""


def counted_reductions(record: RunRecord) -> Iterator[Confirmed | Refuted]:
    """Say of each line that reduced during training on every rank whether it did so in every step.

    The rank that ran it least counts. The first step or the last may lack it. Where it ran in most steps, but not in
    all, nothing is said.
    """
    per_rank = [_of_rank(record, rank) for rank in record.rank_numbers()]
    for frame in per_rank[0] if per_rank else ():
        location = location_of(frame)
        if location is None or not all(frame in found for found in per_rank):
            continue
        least = min((found[frame] for found in per_rank), key=lambda counted: counted.ran)
        told = f"{least.ran:,} of {count(least.steps, 'training step')}"
        if least.ran >= least.steps - 1:
            times = f"{count(least.calls, 'time')}, {bytes_text(least.size_bytes)} each"
            fact = Fact(
                text=f"each rank ran it in {told} ({times})",
                basis=record.job.kind,
                numbers={"calls": least.calls, "steps": least.steps, "bytes_per_call": least.size_bytes},
            )
            yield Confirmed(location=location, fact=fact)
        elif least.ran <= RARELY * least.steps:
            yield Refuted(location=location, reason=f"it ran in {told}")


def _of_rank(record: RunRecord, rank: int) -> dict[Frame, _Counted]:
    track = record.track(rank)
    if track is None:
        return {}
    backwards = sorted((entry.time_ns, entry.site) for entry in record.backwards if entry.rank == rank)
    times_ns = [time_ns for time_ns, _ in backwards]
    rows: dict[tuple[Frame, int], list[tuple[int, int]]] = {}
    for row in range(len(track)):
        signature, frame = record.signatures[track.signature[row]], record.site(track.site[row]).innermost
        newest = bisect_right(times_ns, track.started_ns[row]) - 1
        if signature.kind in _REDUCTIONS and signature.origin == "user" and frame is not None and newest >= 0:
            rows.setdefault((frame, backwards[newest][1]), []).append((newest, signature.size_bytes))
    found: dict[Frame, _Counted] = {}
    made = Counter(site for _, site in backwards)
    for (frame, site), own in rows.items():
        ran = len({backward for backward, _ in own})
        counted = _Counted(calls=len(own), ran=ran, steps=made[site], size_bytes=max(size for _, size in own))
        known = found.get(frame)
        # Of several loops that come to a line the one that does so most often.
        if made[site] >= FEWEST_STEPS and (known is None or ran / made[site] > known.ran / known.steps):
            found[frame] = counted
    return found
