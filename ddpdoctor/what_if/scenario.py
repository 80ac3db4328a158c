"""Makes of a run and of settings the job that is replayed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean, median, stdev
from typing import Any

import msgspec

from ddpdoctor.diagnosis.sync_points import BUFFERS
from ddpdoctor.errors import NoGround, UsageError
from ddpdoctor.finding import MOST_TIMES, Location
from ddpdoctor.what_if import links
from ddpdoctor.what_if.observed import PHASES, Observed, RankTimes, Replay, Scenario, own_ns, replay
from ddpdoctor.what_if.settings import (
    FIRST_BUCKET_BYTES,
    Gradients,
    Settings,
    layout_with,
    ready_shares,
)

FETCH_SHARE = 0.1
"""Of the data waits of a run the share in which the batch was there already: what is left when loaders keep up."""
QUICK = 0.02
"""Share of the step that a fetch takes at most whose batch was there."""
BF16_BYTES = 0.5
MOST_REPLAYED = 32
"""Of more ranks than these so many stand for all: the slowest of 32 ranks is seldom far from the slowest of 1,000."""
CAST_BYTES_PER_S = {"cpu": 4e9, "device": 4e11}
"""What a cast or a copy of gradients reads and writes a second at least: one CPU core, and a GPU of the year 2017."""


class Assumption(msgspec.Struct, frozen=True, kw_only=True):
    """What the run does not tell, and a prediction has to take for granted."""

    link: links.Link
    bend: float = 0.0
    """How gradients get ready between the first bucket and the last: see ``buckets.ready_shares``."""
    copies: float = 0.5
    """What casts and copies of gradients take, as a share of the most that they may."""
    syncs: float = 0.5
    """What of the waiting in reads of results from the GPU falls away with them."""
    hides: bool = True
    """Backward hides communication. Where both want one core each takes its time from the other."""


def assumptions(observed: Observed) -> tuple[Assumption, ...]:
    """Return the best one first, then the extremes."""
    best = Assumption(link=observed.fit.best)
    bent = [
        msgspec.structs.replace(best, bend=0.6, copies=1.0, syncs=0.0),
        msgspec.structs.replace(best, bend=-0.4, copies=0.0, syncs=1.0),
    ]
    if observed.is_crowded:
        bent.append(msgspec.structs.replace(best, hides=False))
    return (best, *(Assumption(link=link) for link in observed.fit.likely[1:]), *bent)


def scenario(observed: Observed, settings: Settings, assumption: Assumption) -> Scenario:
    """Return the job with the settings.

    Raises UsageError for settings that this job cannot have, and NoGround for those of whose effect the run tells
    nothing.
    """
    ranks = without_straggler(observed.ranks) if settings.straggler == "none" else observed.ranks
    micro, synchronised = observed.micro_batches, observed.synchronised
    grown = 1.0
    if settings.accumulation is not None:
        grown, synchronised = settings.accumulation / micro, 1
        micro = float(settings.accumulation)
        ranks = tuple(_more_batches(times, grown) for times in ranks)
    if settings.host_syncs == "dropped":
        saved = dict(zip([times.rank for times in ranks], host_sync_ns(observed), strict=True))
        if not any(saved.values()):
            raise NoGround("no reads of results from a GPU were seen in the run", "They are recorded on GPUs only.")
        less = [assumption.syncs * saved[times.rank] for times in ranks]
        ranks = tuple(
            msgspec.structs.replace(times, other=tuple(max(0.0, own - saved_ns) for own in times.other))
            for times, saved_ns in zip(ranks, less, strict=True)
        )
    link, ranks, samples = _on_ranks(observed, settings, assumption.link, ranks)
    link = _faster(link, settings)
    layout, per_byte_share, extra_ns = _layout(observed, settings, assumption)
    supply = _supply(observed, settings, ranks, grown) if settings.workers is not None else ()
    if settings.workers is not None or settings.data == "ready":
        ranks = tuple(_fetched(times, observed) for times in ranks)
    if extra_ns:
        ranks = tuple(
            msgspec.structs.replace(times, optimizer=tuple(own + extra_ns for own in times.optimizer))
            for times in ranks
        )
    shares = ready_shares(layout, observed.gradients.layout_bytes, assumption.bend)
    if not assumption.hides:
        shares = (0.0,) * len(layout)
    sent = [size * per_byte_share for size in layout]
    drops_unused = settings.find_unused_parameters is False or settings.static_graph is True
    if observed.gradients.unused_map_bytes and not drops_unused:
        sent, shares = [*sent, observed.gradients.unused_map_bytes], (*shares, 0.0)
    if len(ranks) < 2:
        sent, shares = [], ()
    before, after = _meetings(observed, settings, link, assumption.link, grown)
    return Scenario(
        ranks=ranks,
        micro_batches=micro,
        synchronised=synchronised,
        bucket_ns=tuple(0.0 if settings.communication == "hidden" else link.all_reduce_ns(size) for size in sent),
        bucket_shares=shares,
        one_bucket_seen=len(observed.gradients.layout_bytes) < 2,
        before_ns=before if len(ranks) > 1 else 0.0,
        after_ns=after if len(ranks) > 1 else 0.0,
        supply_ns=supply,
        samples=samples * grown,
    )


def without_straggler(ranks: Sequence[RankTimes]) -> tuple[RankTimes, ...]:
    """No rank takes longer than the one in the middle: its times are drawn as that one's are.

    With an even number of ranks it is the faster one of the two in the middle. Each phase of a slower rank gets the
    distribution of the other's, and keeps its own order: a rank that is slow now and then is none any more.
    """
    totals = sorted((fmean(own_ns(times)), at) for at, times in enumerate(ranks))
    middle_ns, middle = totals[(len(totals) - 1) // 2]
    like = ranks[middle]
    return tuple(times if fmean(own_ns(times)) <= middle_ns else _drawn_like(times, like) for times in ranks)


def host_sync_ns(observed: Observed) -> list[float]:
    """Of each rank the mean per step of its reads of results that its GPU stood still for, at most."""
    found = []
    for times in observed.ranks:
        reads = [read for read in observed.record.host_reads if read.rank == times.rank and read.steps]
        waited = sum(read.wait_ns / read.steps for read in reads)
        found.append(min(waited, fmean(times.other)) if observed.on_device else 0.0)
    return found


def _drawn_like(times: RankTimes, like: RankTimes) -> RankTimes:
    def drawn(own: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
        ordered = sorted(other)
        places = sorted(range(len(own)), key=own.__getitem__)
        values = [0.0] * len(own)
        for number, at in enumerate(places):
            values[at] = min(own[at], ordered[number])
        return tuple(values)

    return msgspec.structs.replace(times, **{name: drawn(getattr(times, name), getattr(like, name)) for name in PHASES})


def _more_batches(times: RankTimes, grown: float) -> RankTimes:
    """Return the same with more micro-batches to a step; the optimizer steps as often."""

    def more(values: Sequence[float]) -> tuple[float, ...]:
        # A step of several micro-batches evens out what one of them happened to take.
        count = max(1, round(grown))
        length = len(values)
        drawn = [fmean(values[(at + number * 7) % length] for number in range(count)) for at in range(length)]
        return tuple(value * grown for value in drawn)

    names = [name for name in PHASES if name != "optimizer"]
    return msgspec.structs.replace(times, **{name: more(getattr(times, name)) for name in names})


def _fetched(times: RankTimes, observed: Observed) -> RankTimes:
    """A rank whose batches are there when it asks for them."""
    ordered = sorted(times.data_wait)
    # With workers the quickest fetches of the run tell what that takes; where none was quick, it is next to nothing.
    quickest = min(ordered[int(FETCH_SHARE * len(ordered))], QUICK * observed.step_ns)
    most = quickest if _workers_seen(observed) else 0.0
    return msgspec.structs.replace(times, data_wait=tuple(min(own, most) for own in times.data_wait))


def _supply(observed: Observed, settings: Settings, ranks: Sequence[RankTimes], grown: float) -> tuple[float, ...]:
    """Return how long the loaders of each rank take for the batches of a step, with so many workers."""
    assert settings.workers is not None
    seen = _workers_seen(observed)
    if seen is None:
        raise NoGround("no DataLoader was seen in the run, so what its workers do is unknown", "Omit `workers`.")
    found = []
    for times in ranks:
        waited = fmean(times.data_wait)
        if not seen:
            work = waited
        elif waited > QUICK * observed.step_ns:
            # They do not keep up: what they make in a step is what it takes.
            work = observed.step_ns * grown * seen
        else:
            work = 0.0
        found.append(work / settings.workers)
    return tuple(found)


def _workers_seen(observed: Observed) -> int | None:
    """Worker processes of the loader that the training drew from most; None where no loader was seen."""
    drawn: dict[int, int] = {}
    for entry in observed.record.passes:
        if entry.rank == observed.ranks[0].rank:
            drawn[entry.loader] = drawn.get(entry.loader, 0) + entry.backwards
    loaders = {entry.loader: entry for entry in observed.record.loaders if entry.rank == observed.ranks[0].rank}
    if not loaders:
        return None
    best = max(loaders, key=lambda number: (drawn.get(number, 0), -number))
    return loaders[best].workers


def _on_ranks(
    observed: Observed, settings: Settings, link: links.Link, ranks: tuple[RankTimes, ...]
) -> tuple[links.Link, tuple[RankTimes, ...], float]:
    """Return the links, the ranks and the samples of a step on another number of ranks or nodes."""
    seen = len(ranks)
    wanted = settings.ranks if settings.ranks is not None else seen
    per_node = max(1, seen // observed.nodes)
    # What fits into a node only the user knows: a run on one node is asked about one node.
    usual = observed.nodes if wanted == seen else -(-wanted // per_node) if observed.nodes > 1 else 1
    nodes = settings.nodes or usual
    if settings.ranks is None and settings.nodes is None:
        return link, ranks, observed.samples
    if nodes > wanted or wanted % nodes:
        raise UsageError(
            f"{wanted} ranks cannot be divided evenly among {nodes} nodes",
            f"The run had {per_node} on a node; `--set nodes=N` sets the number of nodes.",
        )
    between = settings.internode_gbit_per_s
    if nodes > 1 and observed.nodes < 2 and between is None:
        raise NoGround(
            f"the run was on one node and does not show the links between {nodes} nodes",
            "Set their bandwidth: `--set internode_gbit_per_s=100`; or `--set nodes=1`.",
        )
    latency_us = settings.internode_latency_us
    link = links.on_other_ranks(
        link,
        observed.nodes,
        wanted,
        nodes,
        None if between is None else between * 1e9 / 8,
        None if latency_us is None else latency_us * 1e3,
    )
    shrunk = seen / wanted if settings.scaling == "strong" else 1.0
    replayed = min(wanted, max(MOST_REPLAYED, seen))
    # Of fewer ranks the slowest stays: a rank that has a task of its own seldom goes.
    order = sorted(range(seen), key=lambda at: -fmean(own_ns(ranks[at]))) if wanted < seen else list(range(seen))
    grown = tuple(_another(ranks[order[number % seen]], number, number // seen, shrunk) for number in range(replayed))
    return link, grown, observed.samples * (1.0 if settings.scaling == "strong" else wanted / seen)


def _another(times: RankTimes, rank: int, turn: int, shrunk: float) -> RankTimes:
    """A rank like one of the run, whose steps come in another order; with a smaller batch its computation shrinks."""

    def turned(values: Sequence[float], scale: float) -> tuple[float, ...]:
        at = (turn * 11) % len(values)
        return tuple(value * scale for value in (*values[at:], *values[:at]))

    scales = dict.fromkeys(("data_wait", "forward", "backward", "lead"), shrunk) | {"optimizer": 1.0, "other": 1.0}
    return RankTimes(rank=rank, **{name: turned(getattr(times, name), scale) for name, scale in scales.items()})


def _faster(link: links.Link, settings: Settings) -> links.Link:
    if link.ranks < 2:
        return link
    if settings.link_gbit_per_s is not None:
        per_byte = 2 * (link.ranks - 1) / link.ranks / (settings.link_gbit_per_s * 1e9 / 8) * 1e9
        return msgspec.structs.replace(link, ns_per_byte=per_byte)
    if settings.link_speed is not None:
        return msgspec.structs.replace(link, ns_per_byte=link.ns_per_byte / settings.link_speed)
    return link


def _layout(observed: Observed, settings: Settings, assumption: Assumption) -> tuple[tuple[int, ...], float, float]:
    """Return the buckets, what of their bytes is sent, and what else a step takes or, below 0, saves."""
    gradients = observed.gradients
    layout = gradients.layout_bytes
    if settings.bucket_cap_mb is not None:
        layout = rebuilt(
            gradients, settings.bucket_cap_mb, first_bytes=FIRST_BUCKET_BYTES * bool(settings.first_bucket)
        )
    speed = CAST_BYTES_PER_S["device" if observed.on_device else "cpu"]
    extra_ns, share = 0.0, 1.0
    if settings.hook == "bf16_compress":
        if not gradients.float32_share:
            raise NoGround("no float32 gradients were seen in the run, so a cast to bfloat16 halves nothing")
        share = 1.0 - BF16_BYTES * gradients.float32_share
        extra_ns += assumption.copies * 2 * gradients.total_bytes / speed * 1e9
    if settings.gradient_as_bucket_view:
        extra_ns -= (1.0 - assumption.copies) * gradients.total_bytes / speed * 1e9
    return layout, share, extra_ns


def rebuilt(gradients: Gradients, cap_mb: float, *, first_bytes: int = 0) -> tuple[int, ...]:
    """Return the buckets under another cap; raises NoGround where the parameters were not recorded."""
    if not gradients.sizes_bytes:
        raise NoGround("the sizes of the parameters were not recorded, so the buckets of another cap are unknown")
    return layout_with(gradients.sizes_bytes, cap_mb, first_bytes=first_bytes)


def _meetings(
    observed: Observed, settings: Settings, link: links.Link, seen: links.Link, grown: float
) -> tuple[float, float]:
    """Time in explicit collectives ahead of backward and after it, in a step."""
    before = after = 0.0
    growth = median((1.0, link.latency_ns / seen.latency_ns, 1e3)) if seen.latency_ns and settings.ranks else 1.0
    for meeting in observed.meetings:
        took_ns = meeting.transfer_ns * growth
        if meeting.kind == BUFFERS:
            if settings.broadcast_buffers is False:
                continue
            # Under no_sync DDP broadcasts no buffers.
            took_ns *= min(1.0, 1.0 / meeting.calls) if settings.accumulation and meeting.calls else 1.0
        else:
            if settings.collectives == "dropped":
                continue
            if settings.collectives == "batched" and meeting.calls > 1:
                saved = (meeting.calls - 1) * min(link.latency_ns, took_ns / meeting.calls)
                took_ns = max(took_ns / meeting.calls, took_ns - saved)
            took_ns *= grown
        if meeting.before:
            before += took_ns
        else:
            after += took_ns
    return before, after


# Predicts what a change makes of a step, with the interval in which the truth is expected.

# What a prediction says, as plain data: what reports show, and nothing of how it came about.


class Interval(msgspec.Struct, frozen=True):
    """A figure with the bounds between which it is expected to be found, in nine runs of ten."""

    value: float
    low: float
    high: float

    def per_second(self, samples: float) -> Interval:
        """Return how many samples a second a step of so many makes, where the step is one in ns; at least one long."""
        return Interval(*(samples / max(1.0, step_ns) * 1e9 for step_ns in (self.value, self.high, self.low)))


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change to a job, and what the model says of it."""

    settings: dict[str, Any]
    """As ``--set`` takes them."""
    title: str
    """``bucket_cap_mb=100``, ``no straggler``."""
    step_ns: Interval
    samples_per_s: Interval | None = None
    speedup: Interval
    """Of the throughput: 1.25 is a quarter more samples a second."""
    memory: str = ""
    """What it costs in memory on each rank; empty when nothing."""
    semantics: str = ""
    """What it changes in what is computed; empty when nothing."""
    do: str = ""
    """What to write."""
    location: Location | None = None
    """The line to change."""
    others: tuple[tuple[str, float], ...] = ()
    """Other values of the same setting, and how many times as fast they make the job."""
    note: str = ""
    """What the figure stands on, where that is not the run itself."""
    recommended: bool = False
    """It brings something, whatever the run leaves open."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A number of ranks on the scaling curve."""

    ranks: int
    nodes: int
    step_ns: Interval
    samples_per_s: Interval | None = None
    efficiency: Interval
    """Throughput against so many times that of one rank by itself."""
    limit: str
    """What takes most of a step beside computing: ``data``, ``slowest rank``, the links' ``bandwidth`` or ``latency``;
    ``computation`` where nothing takes much."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Weak or strong scaling."""

    kind: str
    points: tuple[Point, ...] = ()
    serial: str = ""
    """What does not shrink with more ranks, and how much faster the job can get at most (Amdahl)."""


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """All that is predicted of a run."""

    name: str = ""
    directory: str = ""
    ranks: int
    nodes: int
    steps: int
    """Measured steps behind it."""
    step_ns: float
    """As measured."""
    samples_per_s: float | None = None
    replayed_ns: float
    """The step that the model makes of the unchanged run."""
    error: float
    """By how much the replay is off, as a share of the step; negative where it is too short."""
    exposed_ns: float
    waiting_ns: tuple[float, ...] = ()
    """Of each rank, in a step of the replay."""
    links: str = ""
    """Where the cost of an all-reduce comes from."""
    changes: tuple[Change, ...] = ()
    """Best first."""
    combination: tuple[Change, ...] = ()
    """Each with all before it."""
    left_out: tuple[str, ...] = ()
    """Changes of which nothing can be said, with the reason."""
    curves: tuple[Curve, ...] = ()
    notes: tuple[str, ...] = ()


NINETY = 1.645
"""Standard deviations on either side that nine in ten values of a normal distribution lie within."""
LEAST_ERROR = 0.04
"""Two runs of one job differ by so much however steady each of them is (``python -m tests.what_if``)."""
UNSEEN = 0.2
"""Share of a predicted change of the step by which it is wrong even where nothing says so: measured by
``python -m tests.what_if``."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A step under some settings."""

    step_ns: Interval
    samples: float
    """Of all ranks in a step; 0 where they are not known."""
    speedup: Interval
    """Of the work done a second; a step of four micro-batches does four times as much as one of one."""
    least: float
    """The speed-up under the worst of the assumptions, for what the run does not tell."""
    best: Replay
    scenario: Scenario


class Model:
    """The model of one run."""

    def __init__(self, observed: Observed) -> None:
        self.observed = observed
        self._assumptions = assumptions(observed)
        self._before = [replay(scenario(observed, Settings(), each)) for each in self._assumptions]
        blocks = observed.block_step_ns
        self._unsteady = LEAST_ERROR if len(blocks) < 2 else stdev(blocks) / fmean(blocks) / math.sqrt(len(blocks))
        """Standard error of the mean step, by parts of the run, as a share of it."""

    @property
    def unchanged(self) -> Replay:
        """The run itself, replayed."""
        return self._before[0]

    @property
    def error(self) -> float:
        """By how much the replay of the run itself is off, as a share of the step."""
        return self.unchanged.mean_ns / self.observed.step_ns - 1.0

    @lru_cache(maxsize=512)  # noqa: B019  # a model lives as long as its command
    def outcome(self, settings: Settings) -> Outcome:
        """Predict; raises UsageError and NoGround as ``scenario.scenario`` does."""
        made = [scenario(self.observed, settings, each) for each in self._assumptions]
        after = [replay(each) for each in made]
        # What the replay of the run itself is off by is taken for a property of the job.
        steps_ns = [
            self.observed.step_ns * own.mean_ns / before.mean_ns
            for own, before in zip(after, self._before, strict=True)
        ]
        best = steps_ns[0]
        work = self._work(settings)
        wanted = settings.ranks or len(self.observed.ranks)
        spread = self._spread(best, work * len(self.observed.ranks) / wanted)
        step_ns = Interval(best, max(0.0, min(steps_ns) - spread), max(steps_ns) + spread)
        base = self.observed.step_ns
        speedup = Interval(*(_times(work * base, step) for step in (best, step_ns.high, step_ns.low)))
        return Outcome(
            step_ns=step_ns,
            samples=made[0].samples,
            speedup=speedup,
            least=_times(work * base, max(steps_ns)),
            best=after[0],
            scenario=made[0],
        )

    def _spread(self, step_ns: float, work: float) -> float:
        """Return what the interval adds on either side: how unsteady the run is, and what the model cannot know.

        ``work`` is how much more a rank does in a step.
        """
        steadiness = NINETY * math.sqrt(2.0) * self._unsteady
        share = math.hypot(max(LEAST_ERROR, steadiness), min(0.1, abs(self.error)))
        return share * step_ns + UNSEEN * abs(step_ns - work * self.observed.step_ns)

    def _work(self, settings: Settings) -> float:
        """Return how much more a step does than one of the run."""
        seen = len(self.observed.ranks)
        grown = (settings.accumulation or self.observed.micro_batches) / self.observed.micro_batches
        return grown if settings.scaling == "strong" else grown * (settings.ranks or seen) / seen


def _times(before_ns: float, after_ns: float) -> float:
    """By how much a step is faster, up to ``MOST_TIMES``: an interval may reach down to no time at all."""
    return min(MOST_TIMES, before_ns / after_ns) if after_ns > 0 else MOST_TIMES
