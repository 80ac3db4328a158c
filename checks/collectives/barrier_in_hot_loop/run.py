"""Barriers that every step of training runs."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.diagnosis.performance.exposure import BARRIERS
from ddpdoctor.diagnosis.performance.persistence import enough_steps
from ddpdoctor.diagnosis.performance.thresholds import threshold
from ddpdoctor.diagnosis.steps import RankSteps, measured_steps
from ddpdoctor.record.model import RunRecord, Site
from ddpdoctor.record.streams.measured import CallTrack

FEWEST_STEPS = 4
"""Steps of one loop that must be seen before "every step" is said."""
NEARLY_ALL = 0.9
"""Share of the steps of a live run: the last of a pass may lack the barrier."""


class HotBarrier(msgspec.Struct, frozen=True, kw_only=True):
    """A barrier of the user's that is run in every step."""

    kind: str
    site: Site
    calls: int
    """Calls of one rank in the whole record."""
    steps: int
    """Steps of that rank, in loops that were long enough to tell."""


def hot_barriers(record: RunRecord) -> Iterator[HotBarrier]:
    """Yield the barriers that follow every training forward of a loop, on every rank.

    A pass counts when it had four steps or more, so that a barrier at the end of each short pass is none in every step;
    the last step of a pass may lack it.
    """
    per_rank = [_of_rank(record, rank) for rank in record.rank_numbers()]
    for site in per_rank[0] if per_rank else ():
        if all(site in found for found in per_rank):
            calls, steps, kind = per_rank[0][site]
            yield HotBarrier(kind=kind, site=record.site(site), calls=calls, steps=steps)


class LiveBarrier(msgspec.Struct, frozen=True, kw_only=True):
    """What the barriers of every step cost a live run, per step."""

    kind: str
    site: Site
    calls: int
    """Calls of the first rank in the steps that count."""
    steps: int
    blocked_ns: float
    waiting_ns: float
    """What of it is waiting for the last rank, which would only wait elsewhere."""
    costly: bool
    """The barrier itself takes more of the step than it may."""


def live_barriers(record: RunRecord) -> Iterator[LiveBarrier]:
    """Yield the barriers that nearly every measured step ran, on every rank.

    Raises TooLittleEvidence where too few steps were measured.
    """
    summary = enough_steps(record)
    tracks = {track.rank: track for track in record.call_tracks}
    ranks = [steps for steps in measured_steps(record) if steps.rank in tracks]
    per_rank = [_calls_by_place(tracks[steps.rank], steps) for steps in ranks]
    for (kind, site), calls in per_rank[0].items() if per_rank else ():
        often = all(
            len(set(found.get((kind, site), ()))) >= NEARLY_ALL * len(steps)
            for found, steps in zip(per_rank, ranks, strict=True)
        )
        costs = [entry for entry in summary.traffic if entry.kind == kind]
        if not often or not costs or summary.phases is None:
            continue
        share = len(calls) / len(ranks[0]) / sum(entry.calls_per_step for entry in costs)
        blocked_ns = share * sum(entry.ns_per_step or 0.0 for entry in costs)
        waiting_ns = share * sum(entry.waiting_ns_per_step or 0.0 for entry in costs)
        limit_ns = threshold(record, "barrier-in-hot-loop") * summary.phases.step_ns
        yield LiveBarrier(
            kind=kind,
            site=record.site(site),
            calls=len(calls),
            steps=len(ranks[0]),
            blocked_ns=blocked_ns,
            waiting_ns=waiting_ns,
            costly=blocked_ns - waiting_ns > limit_ns,
        )


def _calls_by_place(track: CallTrack, steps: RankSteps) -> dict[tuple[str, int], list[int]]:
    """By kind and call chain of a barrier, the steps that count in which it was called, once a call."""
    counted, found = set(steps.step), dict[tuple[str, int], list[int]]()
    for row in range(len(track)):
        kind = track.kinds[track.kind[row]]
        if kind in BARRIERS and track.step[row] in counted:
            found.setdefault((kind, track.site[row]), []).append(track.step[row])
    return found


def _of_rank(record: RunRecord, rank: int) -> dict[int, tuple[int, int, str]]:
    """Calls, steps and kind of each call chain that runs a barrier in every step of a rank."""
    track = record.track(rank)
    if track is None:
        return {}
    loops: dict[tuple[int, int, int], list[int]] = {}
    for forward in record.forwards:
        if forward.rank == rank and forward.step > 0 and forward.wrapped:
            loops.setdefault((forward.site, forward.pass_loader, forward.pass_ordinal), []).append(forward.step)
    loops = {loop: steps for loop, steps in loops.items() if len(steps) >= FEWEST_STEPS}
    seen: dict[int, set[tuple[int, int]]] = {}
    kinds: dict[int, str] = {}
    calls: dict[int, int] = {}
    for row in range(len(track)):
        signature, site = record.signatures[track.signature[row]], track.site[row]
        if signature.kind in BARRIERS and signature.origin == "user" and site >= 0:
            seen.setdefault(site, set()).add((track.forward_site[row], track.step[row]))
            kinds[site] = signature.kind
            calls[site] = calls.get(site, 0) + 1
    return {
        site: (calls[site], sum(map(len, loops.values())), kinds[site])
        for site, at in seen.items()
        if loops and all((forward, step) in at for (forward, _, _), steps in loops.items() for step in steps[:-1])
    }
