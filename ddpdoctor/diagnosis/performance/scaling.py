"""What all ranks together train, against so many times what one rank trains alone."""

from __future__ import annotations

import msgspec

from ddpdoctor.check import TooLittleEvidence
from ddpdoctor.diagnosis.performance.persistence import enough_steps, holds
from ddpdoctor.diagnosis.performance.summary import RunSummary
from ddpdoctor.diagnosis.performance.thresholds import threshold
from ddpdoctor.record.model import RunRecord


class LostScaling(msgspec.Struct, frozen=True, kw_only=True):
    """A job that falls short of its ranks."""

    ranks: int
    samples_per_s: float
    one_rank_samples_per_s: float
    efficiency: float


def lost_scaling(record: RunRecord) -> LostScaling | None:
    """Return how far a job falls short; None where it does not.

    Raises TooLittleEvidence where no run on one rank is known, or too few steps were measured.
    """
    one = record.job.one_rank_samples_per_s
    if not one:
        raise TooLittleEvidence(
            "no single-rank run to compare with was given: `ddpdoctor profile --nproc 1 train.py` records one, and "
            "`ddpdoctor profile --one-rank RUN` compares with it"
        )
    limit = threshold(record, "low-scaling-efficiency")

    def falls_short(summary: RunSummary) -> bool:
        efficiency = scaling_efficiency(record, summary)
        return efficiency is not None and efficiency < limit

    if not holds(record, falls_short):
        return None
    summary = enough_steps(record)
    efficiency = scaling_efficiency(record, summary)
    assert summary.samples_per_s is not None
    assert efficiency is not None
    return LostScaling(
        ranks=len(summary.ranks),
        samples_per_s=summary.samples_per_s,
        one_rank_samples_per_s=one,
        efficiency=efficiency,
    )


def scaling_efficiency(record: RunRecord, summary: RunSummary) -> float | None:
    """Throughput against so many times that of one rank; None where either is not known."""
    one = record.job.one_rank_samples_per_s
    if not one or summary.samples_per_s is None:
        return None
    return summary.samples_per_s / (one * len(summary.ranks))
