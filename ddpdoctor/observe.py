"""Watches a run: reads what its ranks write, runs the checks on it, and hands out snapshots for a face to show.

``live_source`` is for a run that goes on, ``replay`` for one that is over::

    from ddpdoctor.observe import live_source

    source = live_source(Path("~/.local/state/ddpdoctor/runs/run-20260101-120000-abcd").expanduser())
    print(source.snapshot().verdict.text)

Both raise RecordError for a directory that cannot be read.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import msgspec

from ddpdoctor.diagnosis.gpu_use import mean_utilisation
from ddpdoctor.diagnosis.summary import RunSummary, RunVerdict
from ddpdoctor.launch.job import LaunchedJob
from ddpdoctor.launch.kept_runs import live_processes
from ddpdoctor.monitor.live_run import LiveRun
from ddpdoctor.monitor.rank_view import rank_views
from ddpdoctor.monitor.snapshot import RunState, Snapshot
from ddpdoctor.monitor.stall_view import stall_view
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.plan import RunPlan, read_plan

LOOK_EVERY_NS = 250_000_000


def live_source(directory: Path, job: LaunchedJob | None = None) -> RunSource:
    """Watch a run that goes on; ``job`` is given when this program started it."""
    return RunSource(directory, read_plan(directory), job)


def replay(directory: Path) -> RunSource:
    """Show a run that is over as it was at its end."""
    return RunSource(directory, read_plan(directory), None, source="replay")


class RunSource:
    """A run directory as a source of snapshots; fulfils ``SnapshotSource``."""

    def __init__(
        self, directory: Path, plan: RunPlan, job: LaunchedJob | None, source: Literal["live", "replay"] = "live"
    ) -> None:
        self._directory = directory
        self._plan = plan
        self._job = job
        self._source = source
        self._run = LiveRun(directory, plan)
        self._stalled_since_ns = 0
        self._newest: Snapshot | None = None

    def snapshot(self) -> Snapshot:
        """The newest one; looks at the files at most four times a second."""
        now_ns = time.time_ns()
        if self._newest is None or now_ns - self._newest.now_ns >= LOOK_EVERY_NS:
            self._newest = self._look(now_ns)
        return self._newest

    def ask_for_stacks(self, rank: int) -> None:
        """Have the stack of one rank taken."""

    def end_job(self) -> None:
        """End the job if this program started it."""
        import signal

        if self._job is not None:
            self._job.forward(signal.SIGTERM)

    def close(self) -> None:
        """Let go of files; the job goes on."""
        self._run.close()

    def _look(self, now_ns: int) -> Snapshot:
        record = self._run.look(now_ns)
        summary = RunSummary()
        divergence = self._run.divergence
        self._stalled_since_ns = 0 if divergence is None else self._stalled_since_ns or now_ns
        culprits = (divergence.culprit,) if divergence is not None and divergence.culprit is not None else ()
        exit_code = self._job.exit_code() if self._job is not None else None
        state = self._state(record, exit_code)
        plan = self._plan
        utilisation, computing = mean_utilisation(record)
        return Snapshot(
            now_ns=now_ns,
            source=self._source,
            name=plan.name or self._directory.name,
            command=record.job.command,
            run_directory=str(self._directory),
            launched=self._job is not None,
            state=state,
            started_at_ns=record.job.started_ns,
            ended_at_ns=now_ns if state == "ended" else None,
            exit_code=exit_code,
            world_size=record.job.world_size or None,
            nodes=len({rank.node for rank in record.ranks}) or None,
            backend=record.job.backend,
            device=record.job.device,
            torch_version=record.job.torch_version,
            verdict=RunVerdict(state="unknown", text="no step has been measured yet"),
            steps=_steps(record),
            ranks=rank_views(record, summary, now_ns, culprits),
            gpu_utilisation_percent=utilisation,
            gpu_utilisation_corrected_percent=computing,
            gpus=record.gpus,
            gpus_note=self._run.gpus_note(),
            stall=stall_view(divergence, None, self._stalled_since_ns) if divergence is not None else None,
            notes=self._run.faults(),
        )

    def _state(self, record: RunRecord, exit_code: int | None) -> RunState:
        if exit_code is not None or (self._job is None and record.ranks and not self._run.living()):
            return "ended"
        if self._source == "replay" and not live_processes(self._directory):
            return "ended"
        if self._run.divergence is not None:
            return "stalled"
        return "running" if _steps(record) else "waiting"


def _steps(record: RunRecord) -> int | None:
    """Steps that every rank has made; None before the first."""
    return min((track.step[-1] if len(track) else 0 for track in record.step_tracks), default=None)


def with_exit_code(snapshot: Snapshot, exit_code: int) -> Snapshot:
    """The last snapshot of a job that has ended."""
    return msgspec.structs.replace(snapshot, state="ended", exit_code=exit_code, ended_at_ns=snapshot.now_ns)
