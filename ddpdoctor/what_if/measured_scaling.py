"""What runs of one job on several numbers of ranks amount to: speed-up, efficiency, and what the links carry."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class ScalingRun(msgspec.Struct, frozen=True, kw_only=True):
    """The job on one number of ranks. None: not measured."""

    ranks: int
    run_directory: str = ""
    failed: str = ""
    """Why nothing was measured; empty where something was."""
    steps: int = 0
    step_ns: float | None = None
    samples_per_s: float | None = None
    exposed_share: float | None = None


class AllReduce(msgspec.Struct, frozen=True, kw_only=True):
    """All-reduces of one size."""

    bytes: int
    seconds: float
    bus_bytes_per_s: float
    """2 (N - 1) / N bytes for each byte: what a ring sends over each link."""


class LinkSweep(msgspec.Struct, frozen=True, kw_only=True):
    """The links between so many ranks."""

    ranks: int
    backend: str
    barrier_s: float
    all_reduce: tuple[AllReduce, ...] = ()


class ScalingPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A run against the one on the fewest ranks."""

    run: ScalingRun
    speedup: float | None = None
    efficiency: float | None = None
    """Speed-up for each rank more; 1 is perfect."""


class MeasuredScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How a job scales on this machine."""

    name: str
    points: tuple[ScalingPoint, ...]
    """By number of ranks."""
    sweeps: tuple[LinkSweep, ...] = ()
    notes: tuple[str, ...] = ()


def points_of(runs: Sequence[ScalingRun]) -> tuple[ScalingPoint, ...]:
    """Put each run beside the one on the fewest ranks of which something was measured.

    By samples a second; by steps, where nothing tells the samples.
    """
    measured = sorted((run for run in runs if not run.failed), key=lambda run: run.ranks)
    by_samples = all(run.samples_per_s for run in measured)

    def rate(run: ScalingRun) -> float | None:
        if by_samples:
            return run.samples_per_s
        # With as many samples to a rank's step, whatever their number.
        return None if not run.step_ns else run.ranks / run.step_ns

    base = measured[0] if measured else None
    base_rate = rate(base) if base is not None else None
    points = []
    for run in sorted(runs, key=lambda run: run.ranks):
        own = None if run.failed else rate(run)
        speedup = own / base_rate if own and base_rate else None
        efficiency = None if speedup is None or base is None else speedup * base.ranks / run.ranks
        points.append(ScalingPoint(run=run, speedup=speedup, efficiency=efficiency))
    return tuple(points)
