"""Whether what the figures of a run say held all along, or comes from one bad moment."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

from ddpdoctor.check import TooLittleEvidence
from ddpdoctor.diagnosis.performance.summarise import summarise
from ddpdoctor.diagnosis.performance.summary import RunSummary
from ddpdoctor.diagnosis.record_cache import ByIdentity
from ddpdoctor.diagnosis.steps import between, measured_steps
from ddpdoctor.record.model import RunRecord

FEWEST_STEPS = 20
"""Steps after the warm-up that it takes to judge the speed of a run."""
QUARTERS = 4
HOLDS_IN = 3
"""Quarters of the steps in which a claim has to hold, beside the whole: one long checkpoint is in one of them."""


def enough_steps(record: RunRecord) -> RunSummary:
    """Return the figures of a run; raises TooLittleEvidence where too few steps were measured to judge by them."""
    summary = summarise(record)
    if summary.steps < FEWEST_STEPS:
        raise TooLittleEvidence(
            f"{summary.steps} steps were measured after the warm-up, and at least {FEWEST_STEPS} are needed"
        )
    return summary


def holds(record: RunRecord, claim: Callable[[RunSummary], bool]) -> bool:
    """Return whether a claim is true of the whole run and of at least three of its four quarters."""
    if not claim(enough_steps(record)):
        return False
    return sum(map(claim, quarters(record))) >= HOLDS_IN


def typical(record: RunRecord, figure: Callable[[RunSummary], float]) -> RunSummary:
    """Return the figures of the quarter in the middle by one of them, so that a single long moment counts for nothing.

    Of the two in the middle it is the lower one: what ``holds`` is true of it.
    """
    parts = sorted(quarters(record), key=figure)
    return parts[(len(parts) - 1) // 2]


def quarters(record: RunRecord) -> tuple[RunSummary, ...]:
    """Return the figures of four parts of the run, each with the same number of sampled steps."""
    return _quarters(ByIdentity(record))


@lru_cache(maxsize=2)
def _quarters(key: ByIdentity[RunRecord]) -> tuple[RunSummary, ...]:
    record = key.of
    ranks = measured_steps(record)
    if not ranks:
        return ()
    first = ranks[0]
    sampled = [step for step, exposed in zip(first.step, first.exposed_ns, strict=True) if exposed >= 0]
    steps = sampled if len(sampled) >= QUARTERS else list(first.step)
    starts = [steps[part * len(steps) // QUARTERS] for part in range(1, QUARTERS)]
    bounds = [first.step[0], *starts, max(track.step[-1] for track in record.step_tracks if len(track)) + 1]
    return tuple(summarise(between(record, low, high)) for low, high in pairwise(bounds))
