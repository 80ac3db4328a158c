"""``ddpdoctor what-if``: what changes to a recorded job would gain."""

from __future__ import annotations

from pathlib import Path

import click

from ddpdoctor.cli.options.command import help_option
from ddpdoctor.cli.options.command import runs as complete_runs
from ddpdoctor.cli.output import RunOutput, of_page, run_output_options
from ddpdoctor.cli.report import finished_run, run_directory


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

    def render(kind: str, width: int, colour: bool) -> str:
        if kind == "json":
            return what_if_text.as_json(answer)
        return of_page(kind, what_if_text.page(answer, str(Path.cwd())), width, colour=colour)

    wanted.write_rendered(render)
