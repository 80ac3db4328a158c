"""``ddpdoctor gate --watch``: runs a job or a test suite under the live watch, and ends it once it hangs."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from ddpdoctor.cli.live import signals
from ddpdoctor.cli.live.observed_job import ObservedJob
from ddpdoctor.cli.output import ExaminationOutput
from ddpdoctor.errors import DdpDoctorError, ExitCode
from ddpdoctor.examination import Examination, RehearsalSection, SourceSection, Verdict
from ddpdoctor.finding import Severity
from ddpdoctor.launch.environment import launch_command
from ddpdoctor.profile.watch import RunSource, live_source
from ddpdoctor.report import streams
from ddpdoctor.report.run.run_lines import RunLines

if TYPE_CHECKING:
    from ddpdoctor.launch.job import LaunchedJob
    from ddpdoctor.monitor.snapshot import Snapshot

LOOK_EVERY_S = 0.25
PROVED_FOR_S = 5.0
"""A hang has to stand for so long: a test whose rank raised leaves its peers waiting until its harness ends them."""
END_AT_MOST_S = 2.0
"""What a job that was told to end may take before it is killed: a CI kills us soon after it has told us to end."""


_REASONS = {
    "time-limit": "the time limit was over", "signal": "it was interrupted", "unseen": "the observation failed",
}  # fmt: skip


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How the watching ended."""

    by: Literal["itself", "unseen", "hang", "time-limit", "signal"]
    """``itself`` (``unseen`` where the observation had failed), ``hang``, ``time-limit`` or ``signal``."""
    code: int
    """The job's own."""


def watch_command(
    words: tuple[str, ...], wanted: ExaminationOutput, *, time_limit_s: float | None, fail_on: Severity | None
) -> int:
    """Run a command on our own streams, watched; its exit code, or 1 for a hang or findings, 3 when nothing was seen.

    Raises UsageError when it cannot be started.
    """
    observed = ObservedJob(launch_command(words))
    with signals.kept():
        job = observed.launch(output=streams.STDERR if wanted.takes_stdout else None)
        with signals.Relay(job):
            source = live_source(observed.directory, job)
            ended = _watched(job, source, time_limit_s)
        snapshot = source.final_snapshot()
        source.close()
    examination = _examination(snapshot, ended, words, fail_on or Severity.ERROR)
    wanted.write_run(snapshot, examination)
    return ended.code if ended.by in ("itself", "unseen") and ended.code else examination.exit_code


def _watched(job: LaunchedJob, source: RunSource, time_limit_s: float | None) -> Ended:
    lines = RunLines(str(Path.cwd()))
    until_s = float("inf") if time_limit_s is None else time.monotonic() + time_limit_s
    proved_s: float | None = None
    is_seen = True
    while (code := job.exit_code()) is None:
        now_s = time.monotonic()
        hangs = _look(source, lines) if is_seen else False
        is_seen = is_seen and hangs is not None
        proved_s = (proved_s or now_s) if hangs else None
        if proved_s is not None and now_s - proved_s >= PROVED_FOR_S:
            return Ended(by="hang", code=_end(job))
        if now_s > until_s:
            streams.say(f"ddpdoctor: the time limit of {time_limit_s:g} s is over")
            return Ended(by="time-limit", code=_end(job))
        if signals.wait(LOOK_EVERY_S) is not None:
            return Ended(by="signal", code=_end(job))
    return Ended(by="itself" if is_seen else "unseen", code=code)


def _look(source: RunSource, lines: RunLines) -> bool | None:
    """Say what is new, and whether the job is proved to hang; None once the observation has failed."""
    try:
        snapshot = source.snapshot()
        streams.say_lines(lines.news(snapshot))
        return snapshot.stall is not None and not snapshot.stall.may_go_on
    except Exception as error:
        said = error.message if isinstance(error, DdpDoctorError) else f"{type(error).__name__}: {error}"
        streams.say(f"ddpdoctor: observation failed ({said}); the job is unaffected")
        return None


def _end(job: LaunchedJob) -> int:
    """Tell a job to end, and kill what is left of it."""
    job.forward(signal.SIGTERM)
    until_s = time.monotonic() + END_AT_MOST_S
    while job.exit_code() is None and time.monotonic() < until_s:
        signals.wait(0.1)
    job.kill()
    return job.exit_code() or 0


def _examination(snapshot: Snapshot, ended: Ended, words: tuple[str, ...], fail_on: Severity) -> Examination:
    """Return what the reports for CI servers say of the run."""
    findings = tuple(view.finding for view in snapshot.findings if view.until_ns is None)
    red = any(finding.severity.at_least(fail_on) for finding in findings)
    reason = _REASONS.get(ended.by, "")
    verdict: Verdict = "clean"
    code = ExitCode.CLEAN
    if not reason and not snapshot.ranks:
        reason = "none of its processes created a process group, so nothing was watched"
    elif not reason and ended.code:
        reason = f"its exit code is {ended.code}"
    if red or ended.by == "hang":
        verdict, code, reason = "findings", ExitCode.FINDINGS, ""
    elif reason:
        verdict = "inconclusive"
        code = ExitCode.INTERRUPTED if ended.by == "signal" else ExitCode.INCONCLUSIVE
    return Examination(
        target=" ".join(words),
        root=str(Path.cwd()),
        verdict=verdict,
        exit_code=code,
        complete=not reason,
        fail_on=fail_on,
        source=SourceSection(status="read", files=0, seconds=0.0),
        rehearsal=RehearsalSection(
            status="failed" if reason else "skipped",
            reason=reason or "the command itself was run and watched live",
            ranks=len(snapshot.ranks),
            steps=snapshot.steps or 0,
            seconds=((snapshot.ended_at_ns or snapshot.now_ns) - snapshot.started_at_ns) / 1e9,
        ),
        findings=findings,
        outcomes=(),
        notes=snapshot.notes,
    )
