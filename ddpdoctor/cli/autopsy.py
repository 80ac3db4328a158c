"""``ddpdoctor autopsy``: explain a job that died."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from ddpdoctor.autopsy.dead_job import AutopsyRequest
from ddpdoctor.autopsy.dead_job import autopsy as examine_dead_job
from ddpdoctor.autopsy.live_job import live_autopsy, look
from ddpdoctor.cli.options import help_option, paths_argument
from ddpdoctor.cli.output import ExaminationOutput, output_options
from ddpdoctor.errors import UsageError
from ddpdoctor.finding import Severity
from ddpdoctor.report import streams


@click.command(add_help_option=False)
@paths_argument("paths", "[PATH...]")
@click.option(
    "--live", is_flag=True, help="Examine a job that is hanging now; PATH is the pid of a launcher or a rank."
)
@click.option(
    "--hosts", multiple=True, metavar="HOSTS", help="With --live: examine the ranks on these hosts, over ssh."
)
@click.option("--native", is_flag=True, help="With --live: take C++ stacks, too; each rank pauses for about 0.5 s.")
@click.option(
    "--raw", is_flag=True, hidden=True, help="With --live: print the raw observations for another ddpdoctor to read."
)
@click.option("--tui", is_flag=True, help="Show the result on the screen, like a stalled run.")
@click.option(
    "--fail-on",
    type=click.Choice([severity.value for severity in Severity]),
    default="warning",
    show_default=True,
    help="The lowest severity that sets exit code 1.",
)
@output_options
@help_option()
@click.pass_context
def autopsy(
    ctx: click.Context,
    paths: tuple[str, ...],
    live: bool,
    hosts: tuple[str, ...],
    native: bool,
    raw: bool,
    tui: bool,
    fail_on: str,
    wanted: ExaminationOutput,
) -> None:
    """Explain why a job died, from its logs (any launcher), error files and flight-recorder dumps.

    PATH is a file, a directory, or `-` for stdin, in any mix. Input is never modified or executed.
    With --live, explain a job that is hanging now and was not started with ddpdoctor: py-spy reads the stacks of its
    ranks, and the job continues.

    Exit code: 0 no finding at --fail-on, 1 the cause was found, 2 wrong usage, 3 inconclusive, 130 interrupted.
    """
    if (hosts or native or raw) and not live:
        raise UsageError(f"`--{'hosts' if hosts else 'native'}` goes with `--live`")
    if raw:
        streams.write_result(msgspec.json.encode(look(_pids(paths), native=native)).decode("utf-8") + "\n")
        return
    if not paths and not live:
        raise UsageError(
            "no log or dump was given", "`ddpdoctor autopsy slurm-123.out dumps/` reads a log and a directory."
        )
    wanted.refuse(map(Path, paths))
    request = AutopsyRequest(paths=() if live else paths, fail_on=Severity(fail_on))
    if live:
        names = tuple(name for names in hosts for name in names.split(",") if name)
        examination = live_autopsy(request, _pids(paths), names, native=native)
    else:
        examination = examine_dead_job(request, streams.stdin_stream())
    if tui:
        from ddpdoctor.cli.live.screen import show_autopsy

        show_autopsy(examination)
        ctx.exit(examination.exit_code)
    wanted.write(examination)
    ctx.exit(examination.exit_code)


def _pids(words: tuple[str, ...]) -> tuple[int, ...]:
    for word in words:
        if not word.isdecimal():
            raise UsageError(
                f"{word} is not a pid", "With `--live`, pass the pid of a launcher or of ranks, or nothing."
            )
    return tuple(map(int, words))
