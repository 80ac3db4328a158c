"""``ddpdoctor report``: show again what was recorded of a run."""

from __future__ import annotations

import click

from ddpdoctor.cli.options.command import help_option
from ddpdoctor.cli.options.command import runs as complete_runs
from ddpdoctor.cli.options.recorded_run import run_directory
from ddpdoctor.cli.options.run_output import RunFormat, RunOutput, run_output_options


@click.command(add_help_option=False)
@click.argument("runs", metavar="[RUN]...", nargs=-1, shell_complete=complete_runs)
@run_output_options
@help_option()
def report(
    runs: tuple[str, ...],
    output_format: RunFormat,
    output: str | None,
    reports: tuple[str, ...],
    export: str | None,
    force: bool,
    no_color: bool,
) -> None:
    """Show what was recorded of RUN: a run directory, or the name of a kept run; by default the newest.

    Several runs, recorded by the nodes of one job on their own disks, are joined.
    """
    from ddpdoctor.profile.recorded_run import recorded

    wanted = RunOutput(
        format=output_format, file=output, reports=reports, export=export, force=force, no_color=no_color
    )
    wanted.refuse_what_cannot_be_written()
    if len(runs) > 1:
        from ddpdoctor.profile.several_runs import recorded_together

        snapshot, record = recorded_together([run_directory(run) for run in runs])
    else:
        snapshot, record = recorded(run_directory(runs[0] if runs else None))
    wanted.write(snapshot)
    wanted.write_trace(record)
