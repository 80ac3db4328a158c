"""Predicts what a change makes of a step, with the interval in which the truth is expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean, stdev
from typing import Any

import msgspec

from ddpdoctor.finding import MOST_TIMES, Location
from ddpdoctor.what_if.observed import Observed, Replay, Scenario, replay
from ddpdoctor.what_if.scenario import assumptions, scenario
from ddpdoctor.what_if.settings import Settings

# What a prediction says, as plain data: what reports show, and nothing of how it came about.


class Interval(msgspec.Struct, frozen=True):
    """A figure with the bounds between which it is expected to be found, in nine runs of ten."""

    value: float
    low: float
    high: float


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
    best: Replay
    scenario: Scenario


class Model:
    """The model of one run."""

    def __init__(self, observed: Observed) -> None:
        self.observed = observed
        self._assumptions = assumptions(observed)
        self._before = [replay(scenario(observed, Settings(), each)) for each in self._assumptions]
        self._unsteady = _unsteadiness(observed.block_step_ns)

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
        return Outcome(step_ns=step_ns, samples=made[0].samples, speedup=speedup, best=after[0], scenario=made[0])

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


def _unsteadiness(blocks: Sequence[float]) -> float:
    """Standard error of the mean step, by parts of the run, as a share of it."""
    if len(blocks) < 2:
        return LEAST_ERROR
    return stdev(blocks) / fmean(blocks) / math.sqrt(len(blocks))


def _times(before_ns: float, after_ns: float) -> float:
    """By how much a step is faster, up to ``MOST_TIMES``: an interval may reach down to no time at all."""
    return min(MOST_TIMES, before_ns / after_ns) if after_ns > 0 else MOST_TIMES
