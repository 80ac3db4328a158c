"""What a prediction says, as plain data: what reports show, and nothing of how it came about."""

from __future__ import annotations

from typing import Any

import msgspec

from ddpdoctor.finding import Location


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
