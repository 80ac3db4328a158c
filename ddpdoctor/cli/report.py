"""``ddpdoctor report``: show again what was recorded of a run."""

from __future__ import annotations

import click

from ddpdoctor.cli.options.command import help_option
from ddpdoctor.cli.options.recorded_run import run_directory
from ddpdoctor.cli.options.run_output import RunFormat, RunOutput, run_output_options


@click.command(add_help_option=False)
@click.argument("run", required=False)
@run_output_options
@help_option()
def report(
    run: str | None,
    output_format: RunFormat,
    output: str | None,
    reports: tuple[str, ...],
    export: str | None,
    force: bool,
    no_color: bool,
) -> None:
    """Show what was recorded of RUN: a run directory, or the name of a kept run; by default the newest."""
    from ddpdoctor.profile.watch import recorded

    wanted = RunOutput(
        format=output_format, file=output, reports=reports, export=export, force=force, no_color=no_color
    )
    wanted.refuse_what_cannot_be_written()
    snapshot, record = recorded(run_directory(run))
    wanted.write(snapshot)
    wanted.write_trace(record)
