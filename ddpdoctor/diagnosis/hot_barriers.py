"""Barriers that every step of training runs."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.record.model import RunRecord, Site

FEWEST_STEPS = 4
"""Steps of one loop that must be seen before "every step" is said."""
_BARRIERS = frozenset({"barrier", "monitored_barrier"})


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
        if signature.kind in _BARRIERS and signature.origin == "user" and site >= 0:
            seen.setdefault(site, set()).add((track.forward_site[row], track.step[row]))
            kinds[site] = signature.kind
            calls[site] = calls.get(site, 0) + 1
    return {
        site: (calls[site], sum(map(len, loops.values())), kinds[site])
        for site, at in seen.items()
        if loops and all((forward, step) in at for (forward, _, _), steps in loops.items() for step in steps[:-1])
    }
