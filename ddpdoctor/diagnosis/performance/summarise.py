"""Sums up what was measured of a run in the figures that every face and every check of it stands on."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress
from operator import add, sub
from statistics import fmean

import msgspec

from ddpdoctor.diagnosis.performance.summary import Phases, RankSummary, RunSummary, StepTimes
from ddpdoctor.diagnosis.performance.traffic import explicit_traffic, gradient_traffic, hidden_share
from ddpdoctor.diagnosis.steps import RankSteps, mean, mean_exposed_ns, measured_steps, once_per_record, taken
from ddpdoctor.diagnosis.sync_points import Meetings, explicit_meetings, gradient_meetings, unseen_ranks
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.measured import StepTrack


class _Waits(msgspec.Struct, frozen=True, kw_only=True):
    """Mean time per step that one rank waits for the others."""

    waiting_share: float | None = None
    """Share of its exposed communication that is waiting; None where that is not known."""
    gradients_ns: float | None = None
    explicit_ns: float | None = None


@once_per_record(most=8)
def summarise(record: RunRecord) -> RunSummary:
    """Return the figures of all steps in the record that count; of the last ones with ``summarise(recent(record,
    ns))``.

    The first steps of a run and those after a pause are left out. Throughput is that of the steps, pauses left out.
    """
    measured = measured_steps(record)
    if not measured:
        return RunSummary()
    tracks = {track.rank: track for track in record.step_tracks}
    gradients, explicit = gradient_meetings(record), explicit_meetings(record)
    late = lateness(measured, (*gradients, *explicit))
    waits = _waits(gradients, explicit)
    ranks = tuple(
        _rank_summary(tracks[steps.rank], steps, waits.get(steps.rank, _Waits()), late.get(steps.rank))
        for steps in measured
    )
    phases = _mean_phases([rank.phases for rank in ranks])
    exposed_ns = _added(phases.exposed_waiting_ns, phases.exposed_transfer_ns)
    held_ns = None if exposed_ns is None else exposed_ns + phases.explicit_ns
    traffic = (
        *gradient_traffic(record, measured, gradients),
        *explicit_traffic(record, record.job.world_size or len(measured), explicit),
    )
    scatters = any(entry.kind.startswith("reduce_scatter") for entry in traffic)
    if exposed_ns is None and scatters and not record.wraps and record.job.backend == "gloo":
        # Of a model that is sharded, with none in DDP, each call holds the thread up. NCCL's calls return at once, and
        # those of backward come from another thread.
        exposed_ns = held_ns = phases.explicit_ns
    every_step = array("q", chain.from_iterable(steps.step_ns for steps in measured))
    started_ns = min(tracks[steps.rank].started_at_ns[steps.row[0]] for steps in measured)
    ended_ns = max(rank.measured_at_ns for rank in ranks)
    return RunSummary(
        ranks=ranks,
        steps=min(rank.steps for rank in ranks),
        seconds=(ended_ns - started_ns) / 1e9,
        steps_per_s=1e9 / phases.step_ns,
        samples_per_s=None
        if any(rank.samples_per_s is None for rank in ranks)
        else sum(rank.samples_per_s or 0.0 for rank in ranks),
        step_times=_step_times(every_step),
        phases=phases,
        overlap_ratio=hidden_share(measured),
        exposed_share=None if exposed_ns is None else exposed_ns / phases.step_ns,
        efficiency=None if held_ns is None else 1.0 - held_ns / phases.step_ns,
        traffic=traffic,
        unseen=unseen_ranks(record),
        measured_at_ns=ended_ns,
    )


def _rank_summary(track: StepTrack, steps: RankSteps, waits: _Waits, late: Lateness | None) -> RankSummary:
    calls = sum(taken(track.buckets, steps.row)) + sum(taken(track.explicit_calls, steps.row))
    sent_bytes = sum(taken(track.reduced_bytes, steps.row)) + sum(taken(track.explicit_bytes, steps.row))
    counted = taken(track.samples, steps.row)
    samples = sum(counted)
    sampled_ns = sum(steps.step_ns if all(counted) else compress(steps.step_ns, counted))
    return RankSummary(
        rank=steps.rank,
        steps=len(steps),
        step_times=_step_times(steps.step_ns),
        phases=_phases(steps, waits),
        waiting_ns=_added(waits.gradients_ns, waits.explicit_ns),
        late_ns=None if late is None else late.late_ns,
        late_phase="" if late is None else late.phase,
        times_late=0 if late is None else late.times_late,
        overlap_ratio=hidden_share((steps,)),
        bytes_per_step=sent_bytes / len(steps),
        collectives_per_step=calls / len(steps),
        samples_per_s=samples / sampled_ns * 1e9 if samples else None,
        measured_at_ns=track.ended_at_ns[steps.row[-1]],
    )


def _phases(steps: RankSteps, waits: _Waits) -> Phases:
    """The mean of each phase; exposed communication is part of the mean backward."""
    backward_ns = mean(steps.backward_ns)
    exposed_ns = mean_exposed_ns(steps)
    share = waits.waiting_share
    return Phases(
        step_ns=mean(steps.step_ns),
        data_wait_ns=mean(steps.data_wait_ns),
        forward_ns=mean(steps.forward_ns),
        backward_compute_ns=backward_ns - (exposed_ns or 0.0),
        exposed_waiting_ns=None if exposed_ns is None or share is None else exposed_ns * share,
        exposed_transfer_ns=None if exposed_ns is None else exposed_ns * (1.0 - (share or 0.0)),
        explicit_ns=mean(steps.explicit_ns),
        optimizer_ns=mean(steps.optimizer_ns),
        other_ns=mean(steps.other_ns),
    )


def _waits(gradients: Iterable[Meetings], explicit: Iterable[Meetings]) -> dict[int, _Waits]:
    """Return how each rank waited that met others."""
    found: dict[int, _Waits] = {}
    for meeting in (*gradients, *explicit):
        for rank, waiting_ns, held_ns in zip(meeting.ranks, meeting.waiting_ns, meeting.held_ns, strict=True):
            known, waited_ns = found.get(rank, _Waits()), sum(waiting_ns)
            mean_ns = waited_ns / meeting.steps
            if meeting.group is None:
                share = waited_ns / (sum(held_ns) or 1)
                known = msgspec.structs.replace(known, waiting_share=share, gradients_ns=mean_ns)
            else:
                known = msgspec.structs.replace(known, explicit_ns=(known.explicit_ns or 0.0) + mean_ns)
            found[rank] = known
    return found


def _mean_phases(phases: Sequence[Phases]) -> Phases:
    """Means over the ranks; what is not known of one rank stays part of the phase that it lies in."""
    sampled = [entry for entry in phases if entry.exposed_transfer_ns is not None]
    waiting_ns = sum(entry.exposed_waiting_ns or 0.0 for entry in sampled) / len(phases)
    transfer_ns = sum(entry.exposed_transfer_ns or 0.0 for entry in sampled) / len(phases)
    is_split = all(entry.exposed_waiting_ns is not None for entry in sampled)
    return Phases(
        step_ns=fmean(entry.step_ns for entry in phases),
        data_wait_ns=fmean(entry.data_wait_ns for entry in phases),
        forward_ns=fmean(entry.forward_ns for entry in phases),
        backward_compute_ns=fmean(entry.backward_compute_ns for entry in phases),
        exposed_waiting_ns=waiting_ns if sampled and is_split else None,
        exposed_transfer_ns=transfer_ns + (0.0 if is_split else waiting_ns) if sampled else None,
        explicit_ns=fmean(entry.explicit_ns for entry in phases),
        optimizer_ns=fmean(entry.optimizer_ns for entry in phases),
        other_ns=fmean(entry.other_ns for entry in phases),
    )


def _added(one: float | None, other: float | None) -> float | None:
    """Return the sum of what is known; None where nothing is."""
    return None if one is None and other is None else (one or 0.0) + (other or 0.0)


def _step_times(durations: Sequence[int]) -> StepTimes:
    """The percentiles by the nearest rank."""
    ordered = sorted(durations)
    p50, p95 = (float(ordered[min(len(ordered) - 1, int(share * len(ordered)))]) for share in (0.5, 0.95))
    return StepTimes(p50_ns=p50, p95_ns=p95)


# Who comes last where ranks meet, by how much, and which phase of its step made it late.

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
    excused = _Excuses(met)
    # By rank and the ranks that it meets: who comes behind time to two groups of a mesh is late once.
    late_ns: dict[int, dict[tuple[int, ...], float]] = {rank: {} for meeting in met for rank in meeting.ranks}
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
            late -= excused.ns(rank, meeting.ranks, last_ns, late)
            if not late:
                continue
            times[rank] += 1
            of_these = late_ns[rank]
            of_these[meeting.ranks] = of_these.get(meeting.ranks, 0.0) + late / meeting.steps
            if phase := phases.longest(rank, meeting.ranks, meeting.step[at], MOST * late):
                blamed[rank][phase] = blamed[rank].get(phase, 0.0) + late / meeting.steps
    found = {}
    for rank, by_group in late_ns.items():
        # Where no phase makes up most of the lateness the rank is slower in everything.
        worst = max(blamed[rank], key=lambda phase: blamed[rank][phase], default="")
        phase = worst if worst and blamed[rank][worst] >= MOST * sum(by_group.values()) else ""
        most_ns = max(by_group.values(), default=0.0)
        found[rank] = Lateness(late_ns=most_ns, times_late=times[rank], phase=phase)
    return found


class _Excuses:
    """What ranks waited in one group before they came late to another, as in a mesh: not they were late."""

    def __init__(self, meetings: Sequence[Meetings]) -> None:
        self._met: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {}
        if len({meeting.ranks for meeting in meetings}) < 2:
            return
        for meeting in meetings:
            if min(map(min, meeting.arrived_ns)) <= 0:
                continue  # Where clocks differ the arrivals are no times.
            for rank, arrived_ns, waiting_ns in zip(meeting.ranks, meeting.arrived_ns, meeting.waiting_ns, strict=True):
                rows = zip(arrived_ns, waiting_ns, strict=True)
                self._met.setdefault(rank, []).extend((at_ns, waited_ns, meeting.ranks) for at_ns, waited_ns in rows)
        for met in self._met.values():
            met.sort()

    def ns(self, rank: int, members: tuple[int, ...], arrived_ns: int, late_ns: int) -> int:
        """Return how much of a lateness the rank had waited for others since it last met these."""
        met = self._met.get(rank, ())
        waited_ns = 0
        for at in range(bisect_left(met, (arrived_ns,)) - 1, -1, -1):
            _, own_ns, others = met[at]
            if others == members or waited_ns >= late_ns:
                break
            waited_ns += own_ns
        return min(waited_ns, late_ns)


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
