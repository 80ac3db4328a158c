"""In how many training steps each reduction of the user's ran; what its result is for, only the source tells."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.diagnosis.hot_barriers import training_loops
from ddpdoctor.diagnosis.wording import bytes_text, count, location_of
from ddpdoctor.finding import Confirmed, Fact, Frame, Refuted
from ddpdoctor.record.model import RunRecord

_REDUCTIONS = frozenset({"all_reduce", "reduce"})
RARELY = 0.5
"""Share of the steps up to which it is not run in every step, whatever the source looks like."""


class _Counted(msgspec.Struct, frozen=True, kw_only=True):
    """How often a rank ran a line in the training steps of the loop that it belongs to."""

    calls: int
    """In those steps."""
    ran: int
    """Steps in which it ran."""
    steps: int
    size_bytes: int
    """Of the largest call."""
    in_every_step: bool
    """The last step of a pass may lack it."""


def counted_reductions(record: RunRecord) -> Iterator[Confirmed | Refuted]:
    """Say of each line that reduced after training forwards on every rank whether it did so in every step.

    The rank that ran it least counts. Where it ran in most steps, but not in all, nothing is said.
    """
    per_rank = [_of_rank(record, rank) for rank in record.rank_numbers()]
    for frame in per_rank[0] if per_rank else ():
        location = location_of(frame)
        if location is None or not all(frame in found for found in per_rank):
            continue
        least = min((found[frame] for found in per_rank), key=lambda counted: counted.ran)
        steps = count(least.steps, "training step")
        if least.in_every_step:
            fact = Fact(
                text=f"each rank ran it {count(least.calls, 'time')} in {steps}, {bytes_text(least.size_bytes)} a time",
                basis=record.job.kind,
                numbers={"calls": least.calls, "steps": least.steps, "bytes_per_call": least.size_bytes},
            )
            yield Confirmed(location=location, fact=fact)
        elif least.ran <= RARELY * least.steps:
            yield Refuted(location=location, reason=f"it ran in {least.ran} of {steps}")


def _of_rank(record: RunRecord, rank: int) -> dict[Frame, _Counted]:
    track = record.track(rank)
    if track is None:
        return {}
    rows: dict[Frame, list[int]] = {}
    for row in range(len(track)):
        signature, frame = record.signatures[track.signature[row]], record.site(track.site[row]).innermost
        if signature.kind in _REDUCTIONS and signature.origin == "user" and frame is not None:
            rows.setdefault(frame, []).append(row)
    passes: dict[int, list[list[int]]] = {}
    for (forward, _, _), steps in training_loops(record, rank).items():
        passes.setdefault(forward, []).append(steps)
    found: dict[Frame, _Counted] = {}
    for frame, own in rows.items():
        loops = []
        for forward in sorted({track.forward_site[row] for row in own} & passes.keys()):
            of_loop = {step for steps in passes[forward] for step in steps}
            inside = [row for row in own if track.forward_site[row] == forward and track.step[row] in of_loop]
            ran = len({track.step[row] for row in inside})
            loops.append(
                _Counted(
                    calls=len(inside),
                    ran=ran,
                    steps=len(of_loop),
                    size_bytes=max((record.signatures[track.signature[row]].size_bytes for row in inside), default=0),
                    in_every_step=ran >= len(of_loop) - len(passes[forward]),
                )
            )
        if loops:
            # Of several loops that come to a line the one that does so most often.
            found[frame] = max(loops, key=lambda loop: loop.ran / loop.steps)
    return found
