"""Reads what a recorded run on one rank trained a second, which the ranks of another run are measured against."""

from __future__ import annotations

from ddpdoctor.diagnosis.performance.persistence import FEWEST_STEPS
from ddpdoctor.errors import UsageError
from ddpdoctor.launch.runs.kept_runs import live_processes, named_run
from ddpdoctor.profile.recorded_run import recorded

_HOW = "`ddpdoctor profile --nproc 1 train.py` records one, and says at its end where."


def one_rank_samples_per_s(name: str) -> float:
    """Return the throughput of a run on one rank: a run directory, or the name of a kept run.

    Raises RecordError when it cannot be read, and UsageError when it is no finished run on one rank of which enough was
    measured.
    """
    directory = named_run(name)
    if live_processes(directory):
        raise UsageError(f"the run in {name} goes on", "Wait for its end: it would share this machine with the other.")
    snapshot, _ = recorded(directory)
    if (snapshot.world_size or 0) > 1:
        raise UsageError(f"the run in {name} is one of {snapshot.world_size} ranks, and it takes one of one rank", _HOW)
    measured = min((rank.measured_steps for rank in snapshot.ranks), default=0)
    if measured < FEWEST_STEPS:
        raise UsageError(f"{measured} steps of the run in {name} were measured, and it takes {FEWEST_STEPS}", _HOW)
    if not snapshot.samples_per_s:
        raise UsageError(
            f"nothing tells how many samples the run in {name} trained a second",
            "Samples are counted where batches come from a DataLoader.",
        )
    return snapshot.samples_per_s
