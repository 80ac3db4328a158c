"""``ddpdoctor report`` and ``ddpdoctor runs``: what was recorded of a run, and which runs are kept."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from ddpdoctor.cli.options.command import help_option
from ddpdoctor.cli.options.command import runs as complete_runs
from ddpdoctor.cli.options.recorded_run import run_directory
from ddpdoctor.cli.output import LIST_FORMATS, TRACE, RunOutput, run_output_options
from ddpdoctor.errors import DdpDoctorError, ExitCode, UsageError
from ddpdoctor.launch.runs.kept_runs import kept_runs, live_processes, remove_run, size_bytes
from ddpdoctor.record.reader import read_plan
from ddpdoctor.report import streams
from ddpdoctor.report.escape import one_line
from ddpdoctor.report.formats.json import HEAD, indented

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
        return (
            runs_text(listed) if listed else "No run has been recorded yet; `ddpdoctor profile train.py` records one.\n"
        )

    wanted.write_rendered(render)


def kept_run(directory: Path) -> KeptRun:
    """Read what the list says of a run; what cannot be read is not known, and the reason is noted."""
    run = KeptRun(name=directory.name, directory=str(directory), size_bytes=size_bytes(directory))
    stamp = directory.name.split("-")[1:3]
    try:
        run = msgspec.structs.replace(
            run, started=time.strftime("%Y-%m-%d %H:%M", time.strptime(" ".join(stamp), "%Y%m%d %H%M%S"))
        )
    except ValueError:
        pass
    from ddpdoctor.monitor.history import NeverWatched
    from ddpdoctor.monitor.replay import final_snapshot

    try:
        plan = read_plan(directory)
        run = msgspec.structs.replace(run, script=plan.name or NOT_KNOWN)
        try:
            shown = final_snapshot(directory)
            run = msgspec.structs.replace(
                run, ranks=shown.world_size, steps=shown.steps, verdict=shown.verdict.state.upper()
            )
        except NeverWatched:
            pass
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
