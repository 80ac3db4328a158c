"""Opens the recorded run that a command names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.errors import DdpDoctorError, ExitCode, UsageError

if TYPE_CHECKING:
    from ddpdoctor.monitor.snapshot import Snapshot
    from ddpdoctor.record.model import RunRecord


def run_directory(run: str | None) -> Path:
    """Return the directory of a run: a path, or the name of a kept run; by default the newest.

    Raises UsageError where there is none.
    """
    from ddpdoctor.launch.runs.kept_runs import kept_runs, named_run

    if run is not None:
        return named_run(run).absolute()
    runs = kept_runs()
    if not runs:
        raise UsageError("no run has been recorded yet", "`ddpdoctor profile train.py` records one.")
    return runs[0].absolute()


def finished_run(directory: Path) -> tuple[Snapshot, RunRecord]:
    """Return what was recorded of a run that is over.

    Raises UsageError where it continues, or is a rehearsal, RecordError where it cannot be read, and an inconclusive
    error where its steps can be read in part only: what is said of all ranks would be said of some.
    """
    from ddpdoctor.launch.runs.kept_runs import live_processes
    from ddpdoctor.profile.recorded_run import recorded

    snapshot, record = recorded(directory)
    if live_processes(directory):
        raise UsageError(f"the run in {directory} is still going on", "Wait until it ends.")
    if record.job.kind != "run":
        raise UsageError(
            f"{directory} is the record of a rehearsal; its times are not those of the job",
            "`ddpdoctor profile train.py` records a run.",
        )
    steps = record.stream("step_tracks")
    if steps.state == "truncated":
        error = DdpDoctorError(
            f"the record in {directory} is not whole: {steps.reason}",
            f"Copy the run directory anew; `ddpdoctor report {directory}` shows what there is.",
        )
        error.exit_code = ExitCode.INCONCLUSIVE
        raise error
    return snapshot, record
