"""``ddpdoctor clean``: show, and remove, what rehearsals that were killed left behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import click

from ddpdoctor.cli.options import help_option
from ddpdoctor.errors import ExitCode, UsageError
from ddpdoctor.launch.created_files import Leftover, clean_up, leftovers
from ddpdoctor.report import streams
from ddpdoctor.report.streams import one_line

SHOWN = 200
"""Paths of one rehearsal that are named."""


@click.command(add_help_option=False)
@click.option("--yes", "-y", is_flag=True, help="Remove without confirmation.")
@help_option()
@click.pass_context
def clean(ctx: click.Context, yes: bool) -> None:
    """Show what killed rehearsals left in your directories, and remove it after confirmation.

    Only files that a rehearsal certainly created, unchanged since, are removed; everything else stays and is shown with
    the reason.

    Exit code: 0 nothing is left, or you were asked; 2 something is left and there was no terminal to ask on, or it
    could not be removed.
    """
    found = leftovers()
    if not found:
        streams.write_result("There are no leftovers of killed rehearsals.\n")
        return
    streams.write_result("\n".join(line for leftover in found for line in _lines(leftover)) + "\n")
    ours = [leftover for leftover in found if not leftover.foreign]
    number = sum(len(leftover.files.made) for leftover in ours)
    if number and not yes:
        if not streams.is_interactive():
            raise UsageError(
                "nothing was removed: there is no terminal to confirm on", "`ddpdoctor clean --yes` removes it."
            )
        if not click.confirm(f"Remove {_count(number)}?", err=True):
            return
    done = [clean_up(leftover) for leftover in ours]
    removed = sum(len(each.made) for each in done)
    if removed:
        streams.write_result(f"Removed {_count(removed)}.\n")
    shown = {left for leftover in ours for left in leftover.files.left}
    kept = [left for each in done for left in each.left if left not in shown]
    for left in kept:
        streams.say(f"left in place: {one_line(left.path)}: {left.reason}")
    ctx.exit(ExitCode.ERROR if kept else ExitCode.CLEAN)


def _lines(leftover: Leftover) -> Iterator[str]:
    what = f"A rehearsal of {one_line(leftover.script)}" if leftover.script else "A rehearsal"
    if leftover.foreign:
        whose = (
            "the process that made it is unknown"
            if leftover.owner is None
            else (
                f"it was started on {one_line(leftover.owner.host)}, and only that host can tell whether it is still "
                "running: run `ddpdoctor clean` there"
            )
        )
        yield f"{what} is not touched: {whose}. Its record is {leftover.run_directory}."
        return
    if leftover.files.made:
        yield f"{what} was killed, and left:"
        yield from _some(one_line(path) for path in leftover.files.made)
    else:
        yield f"{what} was killed."
    if leftover.files.left:
        yield "Always left in place:"
        yield from _some(f"{one_line(left.path)}: {left.reason}" for left in leftover.files.left)


def _some(lines: Iterable[str]) -> Iterator[str]:
    every: Sequence[str] = list(lines)
    for line in every[:SHOWN]:
        yield f"  {line}"
    if len(every) > SHOWN:
        yield f"  and {len(every) - SHOWN} more"


def _count(number: int) -> str:
    return f"{number} path{'' if number == 1 else 's'}"
