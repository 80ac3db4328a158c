"""What all ranks together train, against so many times what one rank trains alone."""

from __future__ import annotations

import msgspec

from ddpdoctor.diagnosis.steadiness import enough_steps, holds
from ddpdoctor.diagnosis.summary import RunSummary
from ddpdoctor.diagnosis.thresholds import threshold
from ddpdoctor.record.model import RunRecord


class LostScaling(msgspec.Struct, frozen=True, kw_only=True):
    """A job that falls short of its ranks."""

    ranks: int
    samples_per_s: float
    one_rank_samples_per_s: float
    efficiency: float


def lost_scaling(record: RunRecord) -> LostScaling | None:
    """How far a job falls short; None where it does not, or no run on one rank is known.

    Raises TooLittleEvidence where too few steps were measured.
    """
    one = record.job.one_rank_samples_per_s
    if not one:
        return None
    limit = threshold(record, "low-scaling-efficiency")

    def efficiency(summary: RunSummary) -> float:
        return 1.0 if summary.samples_per_s is None else summary.samples_per_s / (one * len(summary.ranks))

    if not holds(record, lambda part: efficiency(part) < limit):
        return None
    summary = enough_steps(record)
    assert summary.samples_per_s is not None
    return LostScaling(
        ranks=len(summary.ranks),
        samples_per_s=summary.samples_per_s,
        one_rank_samples_per_s=one,
        efficiency=efficiency(summary),
    )
