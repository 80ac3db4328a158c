"""What a recorded run gives to a replay: each rank's own times by step, its meetings, its buckets, and its links."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from statistics import fmean, median

import msgspec

from ddpdoctor.diagnosis.steps import ByIdentity, RankSteps, common_rows, measured_steps
from ddpdoctor.diagnosis.sync_points import BUFFERS, Meetings, explicit_meetings, replica_sets
from ddpdoctor.diagnosis.wording import rank_list
from ddpdoctor.errors import NoGround
from ddpdoctor.record.layout import CORE_TIME, CORE_WAIT
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.measured import StepTrack
from ddpdoctor.what_if import links
from ddpdoctor.what_if.settings import Gradients, gradients_of

FEWEST_STEPS = 20
"""Steps after the warm-up that it takes to predict from."""
FEWEST_SAMPLED = 8
"""Of these, steps with DDP's own measurement of communication."""
MOST_CELLS = 512
"""Steps times ranks that are replayed: a prediction from 8 ranks takes 64 steps, spread over the run."""
FEWEST_REPLAYED = 24
HICCUP = 2.0
"""A step that takes so many times the median is none that a prediction is made of: a checkpoint, a busy machine."""
FREE_CORES = 0.5
"""Gradients are sent beside backward where so much of a core is left of each rank's."""
BACK_TO_BACK_NS = 500_000
"""Between two collectives of one chain no rank does more than this by itself."""


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """The explicit collectives of one kind: means per step."""

    kind: str
    calls: float
    bytes: float
    transfer_ns: float
    """Without the waiting for the last rank."""
    before: bool
    """They come ahead of backward."""
    site: int = -1


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """A run as it can be replayed."""

    record: RunRecord
    ranks: tuple[RankTimes, ...]
    steps: int
    """Measured steps that all ranks have in common."""
    step_ns: float
    """Mean over all of them and over the ranks."""
    block_step_ns: tuple[float, ...]
    """The same of eight parts of the run: how steady it was."""
    samples: float
    """Of all ranks in a step; 0 where they are not known."""
    micro_batches: float
    synchronised: int
    gradients: Gradients
    meetings: tuple[Meeting, ...]
    fit: links.Fit
    nodes: int
    on_device: bool
    """Forward and backward are those of GPUs."""
    cores_per_rank: int
    """Where a rank has the fewest; 0 when not known."""
    is_crowded: bool
    """The ranks compute on all cores that they have: what sends gradients takes one away from backward."""


def observe(record: RunRecord) -> Observed:
    """Take from a record what a replay needs; raises NoGround, with a sentence, where that is not there."""
    return _observe(ByIdentity(record))


@lru_cache(maxsize=4)
def _observe(key: ByIdentity[RunRecord]) -> Observed:
    record = key.of
    measured = measured_steps(record)
    _demand_ranks(record, measured)
    places = _usual(measured, common_rows(measured))
    common = len(places[0])
    if common < FEWEST_STEPS:
        raise NoGround(
            f"the run is too short: {common} steps were measured on all ranks after the warm-up, and at least "
            f"{FEWEST_STEPS} are needed",
            "Profile a longer run of the job.",
        )
    tracks = {track.rank: track for track in record.step_tracks}
    first = measured[0].rank
    gradients = gradients_of(
        [wrap for wrap in record.wraps if wrap.rank == first],
        [layout for layout in record.bucket_layouts if layout.rank == first],
    )
    if gradients is None or not any(tracks[first].buckets):
        raise NoGround(
            "the run reduced no gradients in buckets: no model was wrapped in DistributedDataParallel, or no backward "
            "was synchronised",
            "A prediction replays DDP's buckets; profile a job whose model is wrapped in it.",
        )
    sampled = [
        positions
        for positions in zip(*places, strict=True)
        if all(steps.exposed_ns[at] >= 0 for steps, at in zip(measured, positions, strict=True))
    ]
    if len(sampled) < FEWEST_SAMPLED:
        raise NoGround(
            f"DDP's logger measured the communication of {len(sampled)} steps, and at least {FEWEST_SAMPLED} are "
            "needed",
            "Of steps shorter than 25 ms, one in ten is sampled: profile a longer run of the same job.",
        )
    meetings = explicit_meetings(record)
    held = _held_in_meetings(meetings)
    chosen = _spread(sampled, max(FEWEST_REPLAYED, MOST_CELLS // len(measured)))
    micro = _mean(tracks, measured, places, "micro_batches") or 1.0
    synchronised = max(1, round(_mean(tracks, measured, places, "synchronised")))
    ranks = tuple(
        _times(steps, [positions[at] for positions in chosen], held.get(steps.rank, {}), synchronised)
        for at, steps in enumerate(measured)
    )
    durations = [
        fmean(steps.step_ns[at] for steps, at in zip(measured, positions, strict=True))
        for positions in zip(*places, strict=True)
    ]
    arrivals = [
        min(
            (
                links.Arrival(
                    max(0, steps.window_ns[at] - steps.exposed_ns[at]) / synchronised,
                    steps.exposed_ns[at] / synchronised,
                )
                for steps, at in zip(measured, positions, strict=True)
            ),
            key=lambda arrival: arrival.exposed_ns,
        )
        for positions in sampled[-256:]
    ]
    world_size = len(measured)
    step_ns, on_device = fmean(durations), any(steps.on_device for steps in measured)
    shares = [max(1, node.cores // len(node.ranks)) for node in record.nodes if node.cores and node.ranks]
    cores = min(shares, default=0)
    wanted_ns = dict.fromkeys(record.rank_numbers(), 0.0)
    for gauge in record.gauges:
        if gauge.name in (CORE_TIME, CORE_WAIT):
            wanted_ns[gauge.rank] += gauge.per_step
    return Observed(
        record=record,
        ranks=ranks,
        steps=common,
        step_ns=step_ns,
        block_step_ns=_blocks(durations),
        samples=sum(_mean(tracks, (steps,), (rows,), "samples") for steps, rows in zip(measured, places, strict=True)),
        micro_batches=micro,
        synchronised=synchronised,
        gradients=gradients,
        meetings=_by_kind(record, meetings, measured),
        fit=links.fit(arrivals, gradients, _calls(meetings), world_size, record.job.backend),
        nodes=max(1, _nodes(record)),
        on_device=on_device,
        cores_per_rank=cores,
        is_crowded=bool(cores and not on_device and cores - max(wanted_ns.values(), default=0) / step_ns < FREE_CORES),
    )


def _nodes(record: RunRecord) -> int:
    return len({rank.host or str(rank.node) for rank in record.ranks})


def _usual(measured: Sequence[RankSteps], places: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """Leave out the steps that took far longer than most on some rank."""
    if not places[0]:
        return places
    limits = [HICCUP * median([steps.step_ns[at] for at in rows]) for steps, rows in zip(measured, places, strict=True)]
    kept = [
        positions
        for positions in zip(*places, strict=True)
        if all(steps.step_ns[at] <= limit for steps, at, limit in zip(measured, positions, limits, strict=True))
    ]
    return [list(column) for column in zip(*kept, strict=True)] if kept else [[] for _ in places]


def _demand_ranks(record: RunRecord, measured: Sequence[RankSteps]) -> None:
    """Raise NoGround for a run of one rank, of ranks that are missing, or of several sets of replicas."""
    world_size = record.job.world_size or len(record.ranks)
    if not measured:
        raise NoGround(
            "no step of the run was measured", "Profile a job that trains; `ddpdoctor report` shows what was recorded."
        )
    if world_size < 2:
        raise NoGround(
            "the run has one rank, which sends no gradients: it does not show what more ranks would cost",
            "Profile it on two ranks or more; `ddpdoctor scaling` compares numbers of ranks.",
        )
    missing = sorted(set(range(world_size)) - {steps.rank for steps in measured})
    if missing:
        raise NoGround(
            f"{rank_list(missing)} of {world_size} left no measured steps, and the slowest rank determines the step",
            "Profile all ranks: PYTHONPATH and DDPDOCTOR_RUN must reach each of them.",
        )
    if len(replica_sets(record)) > 1:
        raise NoGround(
            f"the ranks average gradients in {len(replica_sets(record))} groups, and a replay models one",
            "Predictions are made for jobs whose ranks all hold the same model.",
        )


def _held_in_meetings(meetings: Sequence[Meetings]) -> dict[int, dict[int, int]]:
    """By rank and step the time in collectives that the replay makes up for itself."""
    held: dict[int, dict[int, int]] = {}
    for meeting in meetings:
        for rank, column in zip(meeting.ranks, meeting.held_ns, strict=True):
            own = held.setdefault(rank, {})
            for step, duration_ns in zip(meeting.step, column, strict=True):
                own[step] = own.get(step, 0) + duration_ns
    return held


def _times(steps: RankSteps, rows: Sequence[int], held: Mapping[int, int], synchronised: int) -> RankTimes:
    def column(values: array[int]) -> tuple[float, ...]:
        return tuple(float(values[at]) for at in rows)

    return RankTimes(
        rank=steps.rank,
        data_wait=column(steps.data_wait_ns),
        forward=column(steps.forward_ns),
        backward=tuple(float(max(0, steps.backward_ns[at] - steps.exposed_ns[at])) for at in rows),
        lead=tuple(max(0, steps.window_ns[at] - steps.exposed_ns[at]) / synchronised for at in rows),
        optimizer=column(steps.optimizer_ns),
        # Collectives that no other rank took part in as the same are the rank's own time.
        other=tuple(
            float(steps.other_ns[at] + max(0, steps.explicit_ns[at] - held.get(steps.step[at], 0))) for at in rows
        ),
    )


def _by_kind(record: RunRecord, meetings: Sequence[Meetings], measured: Sequence[RankSteps]) -> tuple[Meeting, ...]:
    """Return the explicit collectives of each kind; several groups that run the same beside each other count once."""
    backward_began = _backward_began(measured[0], record)
    found: dict[str, Meeting] = {}
    tracks = {track.rank: track for track in record.call_tracks}
    for meeting in meetings:
        fastest = _transfers(meeting)
        for kind in dict.fromkeys(meeting.kinds):
            at = [index for index, own in enumerate(meeting.kinds) if own == kind]
            per_step: dict[int, float] = {}
            for index in at:
                per_step[meeting.step[index]] = per_step.get(meeting.step[index], 0.0) + fastest[index]
            calls = len(at) / meeting.steps
            early = [
                meeting.arrived_ns[0][index] < backward_began[meeting.step[index]]
                for index in at
                if meeting.step[index] in backward_began
            ]
            track = tracks[meeting.ranks[0]]
            sites = [track.site[row] for row in range(len(track)) if track.kinds[track.kind[row]] == kind]
            entry = Meeting(
                kind=kind,
                calls=calls,
                bytes=sum(meeting.size_bytes[index] for index in at) / meeting.steps,
                transfer_ns=_middle_mean(list(per_step.values())) * len(per_step) / meeting.steps,
                before=kind == BUFFERS or 2 * sum(early) > len(early),
                site=next((site for site in reversed(sites) if site >= 0), -1),
            )
            if kind not in found or found[kind].transfer_ns < entry.transfer_ns:
                found[kind] = entry
    return tuple(found.values())


def _transfers(meeting: Meetings) -> list[float]:
    """Return how long each collective takes once the last rank has come.

    In a chain of collectives with nothing between them the ranks wait for no one's work after the first: what they
    wait there is a part of what the chain costs.
    """
    found: list[float] = []
    for index in range(len(meeting.kinds)):
        held = [column[index] for column in meeting.held_ns]
        chained = (
            index > 0
            and meeting.step[index] == meeting.step[index - 1]
            and all(
                0 <= arrived[index] - arrived[index - 1] - own[index - 1] < BACK_TO_BACK_NS
                for arrived, own in zip(meeting.arrived_ns, meeting.held_ns, strict=True)
            )
        )
        found.append(fmean(held) if chained else float(min(held)))
    return found


def _backward_began(steps: RankSteps, record: RunRecord) -> dict[int, int]:
    """About when the last backward of each sampled step began, by the clock of the explicit collectives."""
    if steps.on_device or _nodes(record) > 1:
        return {}
    return {
        step: reduced_at_ns - backward_ns
        for step, reduced_at_ns, backward_ns in zip(steps.step, steps.reduced_at_ns, steps.backward_ns, strict=True)
        if reduced_at_ns
    }


def _calls(meetings: Sequence[Meetings]) -> list[links.Call]:
    return [
        links.Call(meeting.size_bytes[index], min(column[index] for column in meeting.held_ns))
        for meeting in meetings
        for index, kind in enumerate(meeting.kinds)
        if kind == "all_reduce"
    ]


def _mean(
    tracks: Mapping[int, StepTrack], measured: Sequence[RankSteps], places: Sequence[Sequence[int]], name: str
) -> float:
    """Mean of a column of the tracks over the steps in common, and over the ranks."""
    values = [
        getattr(tracks[steps.rank], name)[steps.row[at]]
        for steps, rows in zip(measured, places, strict=True)
        for at in rows
    ]
    return fmean(values) if values else 0.0


def _spread(rows: list[tuple[int, ...]], most: int) -> list[tuple[int, ...]]:
    """At most so many of the rows, evenly spread, in their order."""
    return rows if len(rows) <= most else [rows[number * len(rows) // most] for number in range(most)]


def _blocks(durations: Sequence[float], parts: int = 8) -> tuple[float, ...]:
    bounds = [part * len(durations) // parts for part in range(parts + 1)]
    return tuple(fmean(durations[low:high]) for low, high in pairwise(bounds) if high > low)


def _middle_mean(values: list[float]) -> float:
    """The mean of the middle half: a hiccup of the machine is in none of it."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return fmean(ordered[quarter : len(ordered) - quarter]) if ordered else 0.0


# Replays the steps of a job on paper: ranks compute, meet, and send buckets in order over one stream.


PHASES = ("data_wait", "forward", "backward", "optimizer", "other")
"""Of a rank's own step."""


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank does by itself in each replayed step, in nanoseconds; columns of equal length."""

    rank: int
    data_wait: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    """Computation of backward, of all micro-batches."""
    lead: tuple[float, ...]
    """Of a synchronised backward: from the first bucket of the run being full to the last."""
    optimizer: tuple[float, ...]
    other: tuple[float, ...]


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it is replayed."""

    ranks: tuple[RankTimes, ...]
    micro_batches: float
    synchronised: int
    """Backwards of a step that reduce gradients."""
    bucket_ns: tuple[float, ...]
    """How long each bucket is on its way once all ranks have launched it."""
    bucket_shares: tuple[float, ...]
    """When each bucket is full: see ``buckets.ready_shares``."""
    one_bucket_seen: bool
    """The shares are of the whole backward, and not of the lead."""
    before_ns: float = 0.0
    """Collectives in which all ranks meet ahead of forward, in a step."""
    after_ns: float = 0.0
    """The same after backward."""
    supply_ns: tuple[float, ...] = ()
    """Of each rank the time in which its loaders make the batches of a step beside the training; empty where the data
    wait of the run stands for itself."""
    samples: float = 0.0
    """Of all ranks in a step; 0 where they are not known."""


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it; means per step in nanoseconds."""

    mean_ns: float
    exposed_ns: float
    """Communication of gradients that nothing hid, waiting included."""
    waiting_ns: tuple[float, ...]
    """Of each rank: for others, at gradients and collectives."""
    transfer_ns: float
    """Gradients on their way with nothing to hide them, and collectives; waiting apart."""
    data_ns: float
    """Waiting for loaders."""


def replay(scenario: Scenario) -> Replay:
    """Replay all steps one after the other; a rank that is late in one step begins the next late."""
    ranks = range(len(scenario.ranks))
    steps = len(scenario.ranks[0].forward)
    micro, synchronised = scenario.micro_batches, scenario.synchronised
    clock = [0.0 for _ in ranks]
    supply = [0.0 for _ in ranks]
    waiting = [0.0 for _ in ranks]
    exposed = data = transfer = 0.0
    durations: list[float] = []
    buckets = list(zip(scenario.bucket_ns, scenario.bucket_shares, strict=True))
    for step in range(steps):
        began = sum(clock)
        for at, times in enumerate(scenario.ranks):
            if scenario.supply_ns:
                # Two batches of each worker are ahead of the training, so that a hiccup of either side is evened out.
                supply[at] = max(supply[at], clock[at] - 2 * scenario.supply_ns[at]) + scenario.supply_ns[at]
                waits = max(0.0, supply[at] - clock[at] - times.data_wait[step]) + times.data_wait[step]
            else:
                waits = times.data_wait[step]
            data += waits
            clock[at] += waits
        if scenario.before_ns:
            transfer += _meet(clock, waiting, scenario.before_ns)
        one_backward = [times.backward[step] / micro for times in scenario.ranks]
        leads = (
            one_backward
            if scenario.one_bucket_seen
            else [min(times.lead[step], one) for times, one in zip(scenario.ranks, one_backward, strict=True)]
        )
        for at, times in enumerate(scenario.ranks):
            clock[at] += times.forward[step] + (micro - synchronised) * one_backward[at]
        for _ in range(synchronised):
            ready = [clock[at] + one_backward[at] for at in ranks]
            done = 0.0
            for bucket_ns, share in buckets:
                launched = max(
                    [ready[at] - min(leads[at] * share, one_backward[at]) for at in ranks] if share else ready
                )
                done = max(done, launched) + bucket_ns
            last = max(ready)
            for at in ranks:
                exposed += max(0.0, done - ready[at])
                waiting[at] += min(last, max(done, ready[at])) - ready[at]
                clock[at] = max(done, ready[at])
            transfer += max(0.0, done - last) * len(clock)
        for at, times in enumerate(scenario.ranks):
            clock[at] += times.optimizer[step]
        if scenario.after_ns:
            transfer += _meet(clock, waiting, scenario.after_ns)
        for at, times in enumerate(scenario.ranks):
            clock[at] += times.other[step]
        durations.append((sum(clock) - began) / len(clock))
    of_all = steps * len(clock)
    return Replay(
        mean_ns=fmean(durations),
        exposed_ns=exposed / of_all,
        waiting_ns=tuple(own / steps for own in waiting),
        transfer_ns=transfer / of_all,
        data_ns=data / of_all,
    )


def _meet(clock: list[float], waiting: list[float], took_ns: float) -> float:
    """All ranks wait for the last one, and leave together; what the transfer took of all of them."""
    last = max(clock)
    for at, now in enumerate(clock):
        waiting[at] += last - now
        clock[at] = last + took_ns
    return took_ns * len(clock)


def own_ns(times: RankTimes) -> list[float]:
    """Return what a rank takes in each step with no one to wait for."""
    return [sum(values) for values in zip(*(getattr(times, name) for name in PHASES), strict=True)]
