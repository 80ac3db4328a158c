"""Ranks that wait for their batches."""

from __future__ import annotations

import msgspec

from ddpdoctor.diagnosis.performance.stragglers import enough_steps, holds, typical
from ddpdoctor.diagnosis.performance.summary import RunSummary, threshold
from ddpdoctor.diagnosis.training.pass_lengths import training_loader
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.training import Loader

NEARLY_ALL = 0.8
"""Share of the waiting in the first batches of passes from which on the workers keep up with the others."""


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
    first_of_pass_ns: float = 0.0
    """What the first batch of a pass waits, where these make nearly all of the waiting; else 0."""


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
    loader = training_loader(record)
    return DataWait(
        share=share,
        wait_ns=wait_ns,
        step_ns=step_ns,
        worst_rank=worst.rank,
        worst_wait_ns=worst.phases.data_wait_ns,
        mean_share=_middle(enough_steps(record))[0],
        loader=loader,
        first_of_pass_ns=_first_of_pass_ns(record, worst.rank, loader),
    )


def _first_of_pass_ns(record: RunRecord, rank: int, loader: Loader | None) -> float:
    """Return the mean of the long waits of a rank, where they come once a pass and the other batches hardly wait."""
    track = next((track for track in record.step_tracks if track.rank == rank), None)
    if track is None or loader is None or not loader.length or len(track.step) < 2 * loader.length:
        return 0.0
    waits = dict(zip(track.step, track.data_wait_ns, strict=True))
    most = max(1, len(waits) // loader.length)
    longest = sorted(waits, key=lambda step: waits[step], reverse=True)[:most]
    at = {step % loader.length for step in longest}
    held = sum(waits[step] for step in longest)
    return held / most if len(at) == 1 and held > NEARLY_ALL * sum(waits.values()) else 0.0


def _middle(summary: RunSummary) -> tuple[float, float, float]:
    """Share, wait and step of the rank in the middle; of two the one that waits less."""
    waits = sorted(
        (rank.phases.data_wait_ns / rank.phases.step_ns, rank.phases.data_wait_ns, rank.phases.step_ns)
        for rank in summary.ranks
    )
    return waits[(len(waits) - 1) // 2] if waits else (0.0, 0.0, 0.0)
