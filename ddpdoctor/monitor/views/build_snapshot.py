"""Puts together what is shown of a run at one moment; pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Literal

import msgspec

from ddpdoctor.diagnosis.performance.gpus import mean_utilisation
from ddpdoctor.diagnosis.performance.scaling import scaling_efficiency
from ddpdoctor.diagnosis.performance.summary import JobFigures, RunSummary, RunVerdict
from ddpdoctor.diagnosis.performance.thresholds import threshold
from ddpdoctor.diagnosis.wording import duration_text
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.monitor.series import Series
from ddpdoctor.monitor.snapshot import FindingView, RankView, RunState, Snapshot, StallView, WaitView
from ddpdoctor.monitor.views.between_steps import meanwhile, overdue_ns
from ddpdoctor.monitor.views.bucket_views import bucket_views
from ddpdoctor.monitor.views.rank_view import rank_views
from ddpdoctor.record.model import RunRecord, shared_fields


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """All that one look at a run brought together."""

    now_ns: int
    record: RunRecord
    summary: RunSummary
    """Of the window that is shown."""
    verdict: RunVerdict
    state: RunState
    findings: tuple[FindingView, ...] = ()
    stall: StallView | None = None
    wait: WaitView | None = None
    cause: Finding | None = None
    culprit: int | None = None
    """The rank that a proof names."""
    gpus_note: str = ""
    notes: tuple[str, ...] = ()
    launched: bool = False
    launcher_pid: int = 0
    exit_code: int | None = None
    source: Literal["live", "replay", "demo"] = "live"


def build_snapshot(look: Look, series: Series, name: str, run_directory: str) -> Snapshot:
    """Return what the faces are shown."""
    record, summary, job = look.record, look.summary, look.record.job
    utilisation, computing = mean_utilisation(record)
    # Advice on a rank that is slower in all it does blames no phase of it.
    holding = [view.finding for view in look.findings if view.until_ns is None]
    accused = [finding.ranks for finding in holding if finding.severity is not Severity.ADVICE]
    culprits = {look.culprit} if look.culprit is not None else _late(summary, accused)
    ranks = rank_views(record, summary, look.now_ns, culprits, series.lateness_ns)
    overdue = overdue_ns(ranks, summary.step_times, look.now_ns) if look.state in ("running", "stalled") else None
    return Snapshot(
        now_ns=look.now_ns,
        source=look.source,
        name=name or PurePath(job.script or run_directory).name,
        command=job.command,
        run_directory=run_directory,
        launched=look.launched,
        launcher_pid=look.launcher_pid,
        state=look.state,
        started_at_ns=job.started_ns,
        ended_at_ns=_ended_ns(look) if look.state == "ended" else None,
        exit_code=look.exit_code,
        world_size=job.world_size or None,
        nodes=len({rank.node for rank in record.ranks}) or None,
        backend=job.backend,
        device=job.device,
        torch_version=job.torch_version,
        verdict=_with_meanwhile(look, ranks, overdue),
        steps=steps_made(record),
        exposed_limit=threshold(record, "exposed-communication"),
        one_rank_samples_per_s=job.one_rank_samples_per_s,
        scaling_efficiency=scaling_efficiency(record, summary),
        gpu_utilisation_percent=utilisation,
        gpu_utilisation_corrected_percent=computing,
        overdue_ns=overdue,
        meanwhile="" if overdue is None and look.stall is None else meanwhile(ranks, look.now_ns),
        ranks=ranks,
        buckets=bucket_views(record),
        gpus=record.gpus,
        gpus_note=look.gpus_note,
        findings=look.findings,
        stall=look.stall,
        wait=look.wait,
        cause=look.cause,
        history=series.history(),
        notes=look.notes,
        **shared_fields(summary, JobFigures),
    )


def _with_meanwhile(look: Look, ranks: tuple[RankView, ...], overdue: int | None) -> RunVerdict:
    """Return the verdict, and what the ranks do while no steps are made; of a standstill it says that anyway."""
    if overdue is None or look.state != "running":
        return look.verdict
    told = f"no step for {duration_text(overdue)}: {meanwhile(ranks, look.now_ns)}"
    waits = (look.wait.text,) if look.wait is not None else ()
    return msgspec.structs.replace(look.verdict, why=(*waits, told, *look.verdict.why))


def steps_made(record: RunRecord) -> int | None:
    """Steps that every rank has made; None before the first."""
    return min((track.step[-1] if len(track) else 0 for track in record.step_tracks), default=0) or None


def _late(summary: RunSummary, accused: Sequence[tuple[int, ...]]) -> set[int]:
    """Ranks that findings name alone and that make the others wait."""
    late = {rank.rank for rank in summary.ranks if rank.late_phase}
    return {ranks[0] for ranks in accused if len(ranks) == 1} & late


def _ended_ns(look: Look) -> int:
    """When the last rank ended, where that is known."""
    times = [rank.ended_ns for rank in look.record.ranks if rank.ended_ns]
    return max(times, default=look.now_ns)
