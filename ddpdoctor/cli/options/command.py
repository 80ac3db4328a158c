"""What the commands have in common: options that print and exit, and script arguments behind ``--``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ddpdoctor.errors import UsageError
from ddpdoctor.report import streams

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

SCRIPT_ARGUMENTS = "ddpdoctor.script_arguments"
"""Key in ``Context.meta`` of what stood behind ``--``."""

MOST_PROCESSES = 1024
"""Ranks to start, or processes that read."""
LONGEST_S = 604_800.0
"""A week; waiting for more than 292 years is beyond what the clock can hold."""

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def result_option(*names: str, help: str, text: Callable[[click.Context], str]) -> Callable[[Decorated], Decorated]:
    """Return an option that writes a text to stdout and ends the command."""

    def show(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            streams.write_result(text(ctx) + "\n")
            ctx.exit()

    return click.option(*names, is_flag=True, is_eager=True, expose_value=False, help=help, callback=show)


def paths_argument(name: str, metavar: str) -> Callable[[Decorated], Decorated]:
    """Any number of paths, none of them empty: what an unset shell variable leaves would mean the working directory."""

    def refuse_empty(ctx: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise UsageError("a path is empty", "An unset shell variable can cause this.")
        return value

    return click.argument(name, metavar=metavar, nargs=-1, callback=refuse_empty, shell_complete=files)


def files(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Leave it to the shell to complete the name of a file."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def runs(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a kept run, and of a directory where none begins so."""
    from click.shell_completion import CompletionItem

    from ddpdoctor.launch.runs.kept_runs import kept_runs

    names = [path.name for path in kept_runs() if path.name.startswith(incomplete)]
    return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="dir")]


def checks(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the code or the name of a check."""
    from click.shell_completion import CompletionItem

    from ddpdoctor.catalogue.registry import read_catalogue

    entries = read_catalogue().entries
    codes = [CompletionItem(entry.code, help=entry.name) for entry in entries]
    named = [CompletionItem(entry.name, help=entry.code) for entry in entries]
    wanted = incomplete.upper() if incomplete[:3].upper() == "DDP" else incomplete
    return [item for item in (*codes, *(named if incomplete else ())) if item.value.startswith(wanted)]


def help_option() -> Callable[[Decorated], Decorated]:
    """Return the option ``--help``."""
    return result_option("--help", "-h", help="Show this message and exit.", text=lambda ctx: ctx.get_help())


class Seconds(click.FloatRange):
    """A number of seconds from ``least`` on, ``nan`` and what no rehearsal takes left out."""

    def __init__(self, least: float, *, least_open: bool = False) -> None:
        super().__init__(min=least, max=LONGEST_S, min_open=least_open)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read the number; raises BadParameter."""
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail("nan is not a number of seconds", param, ctx)
        return seconds


class ScriptCommand(click.Command):
    """A command that runs a script: everything behind ``--`` is the script's, or a launch command, unparsed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put what stands behind the first ``--`` aside and parse the rest."""
        own, script_arguments = args, []
        if "--" in args:
            divide = args.index("--")
            own, script_arguments = args[:divide], args[divide + 1 :]
        ctx.meta[SCRIPT_ARGUMENTS] = tuple(script_arguments)
        return super().parse_args(ctx, own)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Show in the usage where the script's arguments go."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGUMENT...]"]
