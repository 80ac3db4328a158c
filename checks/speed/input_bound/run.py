"""Ranks that wait for their batches."""

from __future__ import annotations

import msgspec

from ddpdoctor.diagnosis.performance.persistence import enough_steps, holds, typical
from ddpdoctor.diagnosis.performance.summary import RunSummary
from ddpdoctor.diagnosis.performance.thresholds import threshold
from ddpdoctor.diagnosis.training.loaders import training_loader
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.data import Loader


class DataWait(msgspec.Struct, frozen=True, kw_only=True):
    """How long the steps of a run wait for data."""

    share: float
    """Of the step, of the rank in the middle, in the quarter of the run in the middle, as are the next two."""
    wait_ns: float
    step_ns: float
    worst_rank: int
    worst_wait_ns: float
    mean_share: float
    """Of all steps together: single long waits show in it."""
    loader: Loader | None
    """The loader that feeds the training, where it is known."""


def data_wait(record: RunRecord) -> DataWait | None:
    """Return the wait for data if it takes more of the step than it may, on half of the ranks or more.

    One rank whose data come late is a straggler and keeps the others waiting elsewhere. Raises TooLittleEvidence where
    too few steps were measured.
    """
    limit = threshold(record, "input-bound")
    if not holds(record, lambda part: _middle(part)[0] > limit):
        return None
    summary = typical(record, lambda part: _middle(part)[0])
    share, wait_ns, step_ns = _middle(summary)
    worst = max(summary.ranks, key=lambda rank: rank.phases.data_wait_ns)
    return DataWait(
        share=share,
        wait_ns=wait_ns,
        step_ns=step_ns,
        worst_rank=worst.rank,
        worst_wait_ns=worst.phases.data_wait_ns,
        mean_share=_middle(enough_steps(record))[0],
        loader=training_loader(record),
    )


def _middle(summary: RunSummary) -> tuple[float, float, float]:
    """Share, wait and step of the rank in the middle; of two the one that waits less."""
    waits = sorted(
        (rank.phases.data_wait_ns / rank.phases.step_ns, rank.phases.data_wait_ns, rank.phases.step_ns)
        for rank in summary.ranks
    )
    return waits[(len(waits) - 1) // 2] if waits else (0.0, 0.0, 0.0)
