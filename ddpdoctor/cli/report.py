"""The commands on what was recorded of a run: ``report``, ``runs``, ``what-if`` and ``compare``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from ddpdoctor.cli.options import Share, help_option
from ddpdoctor.cli.options import runs as complete_runs
from ddpdoctor.cli.output import LIST_FORMATS, TRACE, RunOutput, run_output_options
from ddpdoctor.errors import DdpDoctorError, ExitCode, NoGround, UsageError
from ddpdoctor.launch.kept_runs import kept_runs, live_processes, named_run, remove_run, size_bytes
from ddpdoctor.record.reader import read_plan
from ddpdoctor.report import streams
from ddpdoctor.report.formats.json import HEAD, indented, of_result
from ddpdoctor.report.streams import one_line

if TYPE_CHECKING:
    from ddpdoctor.monitor.snapshot import Snapshot
    from ddpdoctor.record.model import RunRecord

NOT_KNOWN = "-"
NONE_YET = "No run has been recorded yet; `ddpdoctor profile train.py` records one.\n"


class KeptRun(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list."""

    name: str
    """What ``report``, ``compare`` and ``what-if`` take."""
    directory: str
    started: str = NOT_KNOWN
    """Local time, ``2026-11-26 23:48``."""
    script: str = NOT_KNOWN
    """What people call the run: the file name of its script."""
    ranks: int | None = None
    steps: int | None = None
    """Steps that every rank has made."""
    verdict: str = NOT_KNOWN
    """The word that was shown last; ``live`` while the job runs."""
    size_bytes: int
    note: str = ""
    """Why the run cannot be read; empty otherwise."""


@click.command(add_help_option=False)
@click.argument("runs", metavar="[RUN]...", nargs=-1, shell_complete=complete_runs)
@TRACE
@help_option()
def report(runs: tuple[str, ...], wanted: RunOutput) -> None:
    """Show what was recorded of RUN: a run directory, or the name of a kept run; by default the newest.

    Several runs, recorded by the nodes of one job on their own disks, are joined.
    """
    from ddpdoctor.profile.recorded_run import recorded

    wanted.refuse_what_cannot_be_written()
    if len(runs) > 1:
        from ddpdoctor.profile.recorded_run import recorded_together

        snapshot, record = recorded_together([run_directory(run) for run in runs])
    else:
        snapshot, record = recorded(run_directory(runs[0] if runs else None))
    wanted.write(snapshot)
    wanted.write_trace(record)


@click.command(add_help_option=False)
@click.argument("names", metavar="[RUN]...", nargs=-1, shell_complete=complete_runs)
@click.option("--delete", is_flag=True, help="Remove the named runs.")
@run_output_options(formats=LIST_FORMATS)
@help_option()
@click.pass_context
def runs(ctx: click.Context, names: tuple[str, ...], delete: bool, wanted: RunOutput) -> None:
    """List the kept runs of watched jobs, newest first, with the names that other commands take.

    With --delete the named runs are removed; one whose job is still running is not.
    """
    known = {path.name: path for path in kept_runs()}
    for name in names:
        if name not in known:
            raise UsageError(f"there is no kept run {one_line(name)}", "`ddpdoctor runs` lists them.")
    if delete and not names:
        raise UsageError("--delete needs the names of runs", "`ddpdoctor runs` lists them.")
    chosen = [known[name] for name in dict.fromkeys(names)] if names else list(known.values())
    if delete:
        ctx.exit(_delete(chosen))
    listed = [kept_run(directory) for directory in chosen]

    def render(kind: str, width: int, colour: bool) -> str:  # A table has neither to break nor to colour.
        if kind == "json":
            return indented({**HEAD, "runs": listed})
        return runs_text(listed) if listed else NONE_YET

    wanted.write_rendered(render)


def kept_run(directory: Path) -> KeptRun:
    """Read what the list says of a run; what cannot be read is not known, and the reason is noted."""
    run = KeptRun(name=directory.name, directory=str(directory), size_bytes=size_bytes(directory))
    stamp = directory.name.split("-")[1:3]
    with suppress(ValueError):
        started = time.strptime(" ".join(stamp), "%Y%m%d %H%M%S")
        run = msgspec.structs.replace(run, started=time.strftime("%Y-%m-%d %H:%M", started))
    from ddpdoctor.monitor.history import NeverWatched
    from ddpdoctor.monitor.replay import final_snapshot

    try:
        plan = read_plan(directory)
        run = msgspec.structs.replace(run, script=plan.name or NOT_KNOWN)
        with suppress(NeverWatched):
            shown = final_snapshot(directory)
            run = msgspec.structs.replace(
                run, ranks=shown.world_size, steps=shown.steps, verdict=shown.verdict.state.upper()
            )
    except DdpDoctorError as error:
        return msgspec.structs.replace(run, note=error.message)
    return msgspec.structs.replace(run, verdict="live") if live_processes(directory) else run


def runs_text(listed: Sequence[KeptRun]) -> str:
    """Return the list as a table, with the reason below where a run cannot be read."""
    from ddpdoctor.report.layout import size

    head = ("NAME", "STARTED", "SCRIPT", "RANKS", "STEPS", "VERDICT", "SIZE")
    rows = [
        (
            run.name,
            run.started,
            one_line(run.script),
            *(NOT_KNOWN if number is None else str(number) for number in (run.ranks, run.steps)),
            run.verdict,
            size(run.size_bytes),
        )
        for run in listed
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    notes = [f"{run.name} cannot be read: {one_line(run.note)}" for run in listed if run.note]
    return "".join(line.rstrip() + "\n" for line in (*lines, *notes))


def _delete(chosen: Sequence[Path]) -> ExitCode:
    """Remove runs that are over; the exit code is 2 where one, or a part of it, had to stay."""
    stayed = 0
    for directory in chosen:
        if pids := live_processes(directory):
            streams.say(f"{directory.name} was not removed: its job is still running (process {pids[0]})")
            stayed += 1
            continue
        remove_run(directory)
        if directory.exists():
            streams.say(f"{directory} stays: it holds files that the run did not write")
            stayed += 1
        else:
            streams.write_result(f"removed {directory.name}\n")
    return ExitCode.ERROR if stayed else ExitCode.CLEAN


def run_directory(run: str | None) -> Path:
    """Return the directory of a run: a path, or the name of a kept run; by default the newest.

    Raises UsageError where there is none.
    """
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
        raise NoGround(
            f"the record in {directory} is not whole: {steps.reason}",
            f"Copy the run directory anew; `ddpdoctor report {directory}` shows what there is.",
        )
    return snapshot, record


@click.command(add_help_option=False)
@click.argument("before", shell_complete=complete_runs)
@click.argument("after", shell_complete=complete_runs)
@click.option(
    "--allowed-growth",
    type=Share(),
    default="5%",
    show_default=True,
    metavar="SHARE",
    help="The share by which the step may become longer, such as 5%.",
)
@run_output_options()
@help_option()
@click.pass_context
def compare(ctx: click.Context, before: str, after: str, allowed_growth: float, wanted: RunOutput) -> None:
    """Compare two recorded runs of a job, BEFORE and AFTER: run directories, or names of kept runs.

    Step time and phases come with a bootstrap interval, which separates change from noise; then bytes, new and resolved
    findings, and different settings: versions, environment, DDP's options, the script's git commit. Exits with 1 when
    the step is longer by more than --allowed-growth beyond noise, and with 3 when too little was measured.
    """
    from ddpdoctor.diagnosis.performance import run_comparison
    from ddpdoctor.report.run import compare_text

    wanted.refuse_what_cannot_be_written()
    opened = [finished_run(run_directory(run)) for run in (before, after)]
    (first, one), (second, other) = opened
    try:
        compared = run_comparison.compare(one, other)
    except run_comparison.TooShort as gap:
        raise NoGround(
            f"{(before, after)[gap.position]} is too short: {gap.steps} steps were measured on all ranks after the "
            f"warm-up, and at least {run_comparison.FEWEST_STEPS} are needed",
            "Profile a longer run of the job.",
        ) from gap
    findings = [
        {view.finding.fingerprint: view.finding for view in snapshot.findings if view.until_ns is None}
        for snapshot in (first, second)
    ]
    gone = [finding for mark, finding in findings[0].items() if mark not in findings[1]]
    come = [finding for mark, finding in findings[1].items() if mark not in findings[0]]
    told = compared, gone, come, allowed_growth
    name = f"{first.name} and {second.name}"
    wanted.write_page(lambda: compare_text.page(*told, name), lambda: compare_text.as_json(*told))
    ctx.exit(ExitCode.FINDINGS if compared.is_regression(allowed_growth) else ExitCode.CLEAN)


@click.command(name="what-if", add_help_option=False)
@click.argument("run", required=False, shell_complete=complete_runs)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="Predict only this change, such as bucket_cap_mb=100, workers=4, accumulation=4, hook=bf16_compress, "
    "link_speed=2, ranks=64; repeat the option to combine changes.",
)
@run_output_options()
@help_option()
def what_if(run: str | None, settings: tuple[str, ...], wanted: RunOutput) -> None:
    """Predict the gain of changes to RUN: a run directory, or the name of a kept run; by default the newest.

    The steps of the run are simulated: every rank's computation, its buckets on one stream, its waits. Each change
    comes with a prediction interval, its costs, and the line to change.
    """
    from ddpdoctor.what_if.answer import what_if as predict
    from ddpdoctor.what_if.settings import parse

    wanted.refuse_what_cannot_be_written()
    asked = parse(settings) if settings else None
    directory = run_directory(run)
    snapshot, record = finished_run(directory)
    answer = predict(record, asked, name=snapshot.name, directory=str(directory))
    from ddpdoctor.report.run import what_if_text

    wanted.write_page(lambda: what_if_text.page(answer, str(Path.cwd())), lambda: of_result(answer))
