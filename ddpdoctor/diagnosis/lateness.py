"""Who comes last where ranks meet, by how much, and which phase of its step made it late."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ddpdoctor.diagnosis.measured_steps import RankSteps
from ddpdoctor.diagnosis.meetings import Meetings


class Lateness(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank keeps the others waiting."""

    late_ns: float
    """Mean per step that the second last waits for it: what would be saved if it came with that one."""
    times_late: int
    """Meetings to which it came last."""
    phase: str = ""
    """``data_wait``, ``forward``, ``backward``, ``explicit``, ``optimizer`` or ``other``; empty where none of them took
    longer than on the other ranks."""


def lateness(ranks: Sequence[RankSteps], meetings: Iterable[Meetings]) -> dict[int, Lateness]:
    """How late each rank is that met others."""
    met = tuple(meetings)
    phases = _Phases(ranks, met)
    late_ns: dict[int, float] = {rank: 0.0 for meeting in met for rank in meeting.ranks}
    times = dict.fromkeys(late_ns, 0)
    blamed: dict[int, dict[str, float]] = {rank: {} for rank in late_ns}
    for meeting in met:
        waiting = meeting.waiting_ns()
        for at, arrived_ns in enumerate(zip(*meeting.arrived_ns, strict=True)):
            last_ns = max(arrived_ns)
            place = arrived_ns.index(last_ns)
            # Not all ranks wait in a broadcast for one that is late: what nobody waits there is not lost there.
            late = min(
                last_ns - max(arrived_ns[:place] + arrived_ns[place + 1 :]), max(column[at] for column in waiting)
            )
            if not late:
                continue
            rank = meeting.ranks[place]
            times[rank] += 1
            late_ns[rank] += late / meeting.steps
            if phase := phases.longest(rank, meeting, meeting.step[at]):
                blamed[rank][phase] = blamed[rank].get(phase, 0.0) + late / meeting.steps
    return {
        rank: Lateness(
            late_ns=total_ns,
            times_late=times[rank],
            phase=max(blamed[rank], key=lambda phase: blamed[rank][phase], default=""),
        )
        for rank, total_ns in late_ns.items()
    }


class _Phases:
    """The phases of all ranks by step, without the time in which they waited for each other."""

    def __init__(self, ranks: Sequence[RankSteps], meetings: Sequence[Meetings]) -> None:
        self._ranks = {steps.rank: steps for steps in ranks}
        self._places = {steps.rank: dict(zip(steps.step, range(len(steps)), strict=True)) for steps in ranks}
        self._waited = _waited_in_calls(meetings)

    def longest(self, rank: int, meeting: Meetings, step: int) -> str:
        """The phase that exceeded most what it took the others since the ranks had met before.

        That is the optimizer and the code behind it of the step before, and all up to the meeting of this one. Of a
        meeting that comes after this step's optimizer nothing but its place in the code would tell, so that the longer
        of the two optimizer phases counts.
        """
        others = [other for other in meeting.ranks if other != rank]
        excess: dict[str, float] = {}
        for phase, offsets in _SINCE.items():
            for offset in offsets:
                own = self._duration(rank, phase, step - offset)
                theirs = sorted(self._duration(other, phase, step - offset) or 0.0 for other in others)
                if own is not None:
                    # Of two others the shorter: the median of an even number has to be seen on somebody.
                    excess[phase] = max(excess.get(phase, 0.0), own - theirs[(len(theirs) - 1) // 2])
        worst = max(excess, key=lambda phase: excess[phase], default="")
        return worst if worst and excess[worst] > 0 else ""

    def _duration(self, rank: int, phase: str, step: int) -> float | None:
        place = self._places[rank].get(step)
        if place is None:
            return None
        steps = self._ranks[rank]
        if phase == "backward":
            return steps.backward_ns[place] - max(0, steps.exposed_ns[place])
        if phase == "explicit":
            return steps.explicit_ns[place] - self._waited.get((rank, step), 0)
        if phase == "other":
            return steps.other_ns[place] + steps.pause_ns[place]
        columns = {"data_wait": steps.data_wait_ns, "forward": steps.forward_ns, "optimizer": steps.optimizer_ns}
        return columns[phase][place]


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
        for rank, column in zip(meeting.ranks, meeting.waiting_ns(), strict=True):
            for step, waited_ns in zip(meeting.step, column, strict=True):
                waited[rank, step] = waited.get((rank, step), 0) + waited_ns
    return waited
