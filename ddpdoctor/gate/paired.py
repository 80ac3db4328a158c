"""Compares step times of pairs of rehearsals: how much slower one side is, and how far that is certain. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, median, stdev
from typing import TYPE_CHECKING

from ddpdoctor.gate.windows import windows_of
from ddpdoctor.gate_section import TimeComparison

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

FEWEST_PAIRS = 3
_T_95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131)
"""Student's t of the two-sided 95 % interval, by degrees of freedom from 1; later ones are taken for 1.96 and more."""


def step_times_ms(record: RunRecord) -> tuple[float, ...]:
    """Return the duration of each step of the slowest rank, in ms, without the first, in which DDP settles its
    buckets.
    """
    ranks = [windows_of(record, rank) for rank in record.rank_numbers()]
    fewest = min(map(len, ranks), default=0)
    rows = [[(window.end_ns - window.begin_ns) / 1e6 for window in windows[1:fewest]] for windows in ranks]
    return tuple(map(max, zip(*rows, strict=True))) if rows else ()


def compare_times(pairs: Sequence[tuple[Sequence[float], Sequence[float]]], allowed: float) -> TimeComparison:
    """Compare pairs of (before, now), each the step times of one rehearsal.

    The change is the geometric mean of the pairs' ratios of medians, with the t interval of their logarithms: what the
    machine does to both sides of a pair cancels out, what it does between pairs widens the interval. Slower is only
    what has its whole interval above ``allowed``.
    """
    usable = [(before, now) for before, now in pairs if before and now]
    befores, nows = [median(before) for before, _ in usable], [median(now) for _, now in usable]
    logs = [math.log(now / before) for before, now in zip(befores, nows, strict=True) if before > 0 and now > 0]
    steps = sum(len(now) for _, now in usable)
    before_ms, now_ms = (median(befores), median(nows)) if usable else (0.0, 0.0)
    if len(logs) < FEWEST_PAIRS:
        note = f"{len(logs)} pairs were timed, and {FEWEST_PAIRS} are needed to tell a change from noise"
        return TimeComparison(
            pairs=len(logs), steps=steps, before_ms=before_ms, now_ms=now_ms, change=0.0, low=-1.0, high=math.inf,
            allowed=allowed, slower=False, note=note,
        )  # fmt: skip
    centre = mean(logs)
    index = len(logs) - 2
    half = (_T_95[index] if index < len(_T_95) else 2.13) * stdev(logs) / math.sqrt(len(logs))
    low, high = math.expm1(centre - half), math.expm1(centre + half)
    return TimeComparison(
        pairs=len(logs),
        steps=steps,
        before_ms=before_ms,
        now_ms=now_ms,
        change=math.expm1(centre),
        low=low,
        high=high,
        allowed=allowed,
        slower=low > allowed,
    )
