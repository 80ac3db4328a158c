"""``ddpdoctor check``: examine a script before it is launched."""

from __future__ import annotations

import math
from pathlib import Path

import click

from ddpdoctor.cli.command import SCRIPT_ARGUMENTS, ScriptCommand, help_option
from ddpdoctor.errors import UsageError
from ddpdoctor.examination import Examination
from ddpdoctor.examine import ExamineRequest, examine
from ddpdoctor.finding import Severity
from ddpdoctor.report import streams


@click.command(cls=ScriptCommand, add_help_option=False)
@click.argument("script")
@click.option("--static", is_flag=True, help="Read the source only; run nothing and need no torch.")
@click.option(
    "--nproc", type=click.IntRange(min=2), default=2, show_default=True, metavar="N", help="Ranks of the rehearsal."
)
@click.option(
    "--batches",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    metavar="N",
    help="Batches that a pass over a loader yields before it is cut.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    callback=lambda ctx, parameter, value: _finite(value),
    help="End the rehearsal after this time.",
)
@click.option("--python", metavar="PATH", help="Interpreter of the ranks; by default one that has torch is looked for.")
@click.option("--allow-writes", is_flag=True, help="Let the script change files that were there before.")
@click.option("--keep", is_flag=True, help="Keep the files that the rehearsal makes.")
@click.option(
    "--select", multiple=True, metavar="CHECKS", help="Run these checks only: codes, prefixes of codes, or names."
)
@click.option("--ignore", multiple=True, metavar="CHECKS", help="Do not run these checks.")
@click.option(
    "--fail-on",
    type=click.Choice([severity.value for severity in Severity]),
    default=Severity.WARNING.value,
    show_default=True,
    help="The mildest severity that makes the exit code 1.",
)
@click.option(
    "--output-format",
    type=click.Choice(["full", "concise", "json"]),
    default="full",
    show_default=True,
    help="Text for people, one line a finding, or JSON.",
)
@click.option("-o", "--output", metavar="FILE", help="Write the report to a file instead of stdout.")
@click.option("--no-color", is_flag=True, help="No colours; NO_COLOR in the environment does the same.")
@help_option()
@click.pass_context
def check(
    ctx: click.Context,
    script: str,
    static: bool,
    nproc: int,
    batches: int,
    time_limit: float,
    python: str | None,
    allow_writes: bool,
    keep: bool,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    fail_on: str,
    output_format: str,
    output: str | None,
    no_color: bool,
) -> None:
    """Examine SCRIPT: read its source, rehearse it on a few ranks for a few batches, and say what is wrong.

    What stands behind `--` goes to the script. Files that were there before are not changed.

    Exit code: 0 nothing found, 1 findings, 2 wrong usage, 3 inconclusive, 130 interrupted.
    """
    if output is not None:
        _refuse_output(Path(output), Path(script))
    request = ExamineRequest(
        target=script,
        arguments=ctx.meta[SCRIPT_ARGUMENTS],
        static=static,
        nproc=nproc,
        batches=batches,
        time_limit_s=time_limit,
        python=python,
        allow_writes=allow_writes,
        keep=keep,
        select=_words(select),
        ignore=_words(ignore),
        fail_on=Severity(fail_on),
    )
    if static:
        examination = examine(request)
    else:
        with streams.live_progress() as show:
            examination = examine(request, show)
    if output is None:
        colour = streams.colours_wanted(no_color)
        streams.write_result(_rendered(examination, output_format, streams.result_width(), colour=colour))
    else:
        streams.write_result_file(
            Path(output), _rendered(examination, output_format, streams.PLAIN_WIDTH, colour=False)
        )
    ctx.exit(examination.exit_code)


def _rendered(examination: Examination, output_format: str, width: int, *, colour: bool) -> str:
    """Render with the one renderer that is needed; only ``full`` costs the import of rich."""
    if output_format == "json":
        from ddpdoctor.report import json

        return json.render(examination)
    if output_format == "concise":
        from ddpdoctor.report import concise

        return concise.render(examination)
    from ddpdoctor.report import full

    return full.render(examination, width, colour=colour)


def _finite(seconds: float) -> float:
    """Refuse ``nan`` and ``inf``: a rehearsal has to end."""
    if not math.isfinite(seconds):
        raise click.BadParameter(f"{seconds} is not a number of seconds", param_hint="'--time-limit'")
    return seconds


def _words(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word.strip() for value in values for word in value.split(",") if word.strip())


def _refuse_output(output: Path, script: Path) -> None:
    """Refuse before the rehearsal what would fail, or destroy something, after it."""
    if output.is_dir():
        raise UsageError(f"cannot write {output}: it is a directory")
    if not output.absolute().parent.is_dir():
        raise UsageError(f"cannot write {output}: there is no directory {output.absolute().parent}")
    if output.exists() and script.exists() and output.samefile(script):
        raise UsageError(f"cannot write {output}: it is the script to be examined")
    if output.exists() and output.suffix == ".py":
        raise UsageError(f"cannot write {output}: it is a Python file that exists already")
