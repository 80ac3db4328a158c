"""Who comes last where ranks meet, by how much, and which phase of its step made it late."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from operator import add, sub

import msgspec

from ddpdoctor.diagnosis.steps import RankSteps
from ddpdoctor.diagnosis.sync_points import Meetings

MOST = 0.5
"""Share of a rank's lateness that a phase has to explain to be named."""


class Lateness(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank keeps the others waiting."""

    late_ns: float
    """Mean per step that the second last waits for it: what would be saved if it came with that one."""
    times_late: int
    """Meetings to which it came last."""
    phase: str = ""
    """``data_wait``, ``forward``, ``backward``, ``explicit``, ``optimizer`` or ``other``; empty where none of them
    explains most of it."""


def lateness(ranks: Sequence[RankSteps], meetings: Iterable[Meetings]) -> dict[int, Lateness]:
    """Return how late each rank is that met others."""
    met = tuple(meetings)
    phases = _Phases(ranks, met)
    late_ns: dict[int, float] = {rank: 0.0 for meeting in met for rank in meeting.ranks}
    times = dict.fromkeys(late_ns, 0)
    blamed: dict[int, dict[str, float]] = {rank: {} for rank in late_ns}
    for meeting in met:
        longest_wait_ns = list(map(max, *meeting.waiting_ns))
        for at, arrived_ns in enumerate(zip(*meeting.arrived_ns, strict=True)):
            *_, second_ns, last_ns = sorted(arrived_ns)
            # Not all ranks wait in a broadcast for one that is late: what no one waits there is not lost there.
            late = min(last_ns - second_ns, longest_wait_ns[at])
            if not late:
                continue
            rank = meeting.ranks[arrived_ns.index(last_ns)]
            times[rank] += 1
            late_ns[rank] += late / meeting.steps
            if phase := phases.longest(rank, meeting.ranks, meeting.step[at], MOST * late):
                blamed[rank][phase] = blamed[rank].get(phase, 0.0) + late / meeting.steps
    return {
        rank: Lateness(
            late_ns=total_ns,
            times_late=times[rank],
            phase=_most_of(blamed[rank], total_ns),
        )
        for rank, total_ns in late_ns.items()
    }


def _most_of(blamed: Mapping[str, float], total_ns: float) -> str:
    """Return the phase that makes up most of the lateness; empty where none does: the rank is slower in everything."""
    worst = max(blamed, key=lambda phase: blamed[phase], default="")
    return worst if worst and blamed[worst] >= MOST * total_ns else ""


class _Phases:
    """The phases of all ranks by step, without the time in which they waited for each other.

    A job of 64 ranks has thousands of them a second: each is a column per rank, aligned to the steps of all.
    """

    def __init__(self, ranks: Sequence[RankSteps], meetings: Sequence[Meetings]) -> None:
        ordinals = sorted(set().union(*(steps.step for steps in ranks)))
        self._place = {ordinal: place for place, ordinal in enumerate(ordinals)}
        waited = _waited_in_calls(meetings)
        self._columns: dict[str, dict[int, Sequence[int | None]]] = {phase: {} for phase in _SINCE}
        for steps in ranks:
            for phase, values in _durations(steps, waited).items():
                self._columns[phase][steps.rank] = self._aligned(steps, values)
        self._sorted: dict[tuple[str, int, tuple[int, ...]], list[int]] = {}

    def longest(self, rank: int, members: tuple[int, ...], step: int, least_ns: float) -> str:
        """Return the phase that exceeded most what it took the other members since the ranks had met before.

        Empty where that was less than ``least_ns``. What lies between is the optimizer and the code behind it of the
        step before, and all up to the meeting of this one. Of a meeting that comes after this step's optimizer nothing
        but its place in the code would tell, so that the longer of the two optimizer phases counts.
        """
        worst, worst_ns = "", max(least_ns, 1)
        for phase, offsets in _SINCE.items():
            for offset in offsets:
                place = self._place.get(step - offset)
                own = None if place is None else self._columns[phase][rank][place]
                # Only a phase that is as long itself is compared with those of the others, who may be thousands.
                if own is not None and place is not None and own >= worst_ns:
                    excess_ns = own - self._typical(phase, place, members, own)
                    if excess_ns > worst_ns or (excess_ns == worst_ns and not worst):
                        worst, worst_ns = phase, excess_ns
        return worst

    def _typical(self, phase: str, place: int, members: tuple[int, ...], own: int) -> int:
        """Return the median of the members without one of them whose value is ``own``.

        Of two others the shorter: the median of an even number has to be seen on someone.
        """
        key = phase, place, members
        values = self._sorted.get(key)
        if values is None:
            columns = self._columns[phase]
            values = self._sorted[key] = sorted([columns[rank][place] or 0 for rank in members])
        middle = (len(values) - 2) // 2
        return values[middle] if middle < bisect_left(values, own) else values[middle + 1]

    def _aligned(self, steps: RankSteps, values: Sequence[int]) -> Sequence[int | None]:
        if len(steps) == len(self._place):
            return values
        column: list[int | None] = [None] * len(self._place)
        for ordinal, value in zip(steps.step, values, strict=True):
            column[self._place[ordinal]] = value
        return column


def _durations(steps: RankSteps, waited: Mapping[tuple[int, int], int]) -> dict[str, Sequence[int]]:
    """Return the phases of one rank by step, without waiting."""
    exposed = zip(steps.backward_ns, steps.exposed_ns, strict=True)
    explicit = zip(steps.explicit_ns, steps.step, strict=True)
    return {
        "data_wait": steps.data_wait_ns,
        "forward": steps.forward_ns,
        "backward": list(map(sub, steps.backward_ns, steps.exposed_ns))
        if min(steps.exposed_ns, default=0) >= 0
        else [backward_ns - exposed_ns if exposed_ns > 0 else backward_ns for backward_ns, exposed_ns in exposed],
        "explicit": [explicit_ns - waited.get((steps.rank, ordinal), 0) for explicit_ns, ordinal in explicit]
        if waited
        else steps.explicit_ns,
        "optimizer": steps.optimizer_ns,
        "other": list(map(add, steps.other_ns, steps.pause_ns)),
    }


_SINCE: Mapping[str, tuple[int, ...]] = {
    "data_wait": (0,),
    "forward": (0,),
    "backward": (0,),
    "explicit": (0,),
    "optimizer": (0, 1),
    "other": (0, 1),
}
"""Phases, and how many steps back they may lie to make a rank late."""


def _waited_in_calls(meetings: Iterable[Meetings]) -> dict[tuple[int, int], int]:
    """By rank and step, how long a rank waited for others in explicit collectives."""
    waited: dict[tuple[int, int], int] = {}
    for meeting in meetings:
        if meeting.group is None:
            continue
        for rank, column in zip(meeting.ranks, meeting.waiting_ns, strict=True):
            for step, waited_ns in zip(meeting.step, column, strict=True):
                waited[rank, step] = waited.get((rank, step), 0) + waited_ns
    return waited
