"""What the commands have in common: options that print and exit, and script arguments behind ``--``."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from ddpdoctor.errors import UsageError
from ddpdoctor.files import regex
from ddpdoctor.report import streams

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from ddpdoctor.launch.request import LaunchLine

# Which script the command line means, and how it is started: a path, a module, or a launch command behind `--`.


def launch_line(ctx: click.Context, paths: tuple[str, ...], module: str | None) -> LaunchLine:
    """Return what is to be examined; of several paths, which only ``--static`` takes, the first.

    Raises UsageError when nothing is named, when two things are, and for a launch command that is not understood.
    """
    behind: tuple[str, ...] = ctx.meta[SCRIPT_ARGUMENTS]
    if paths and module is not None:
        raise UsageError(f"either {paths[0]} or --module {module}, not both")
    named = paths[0] if paths else module
    if named is None:
        if not behind:
            raise click.UsageError("give a script, `-m MODULE`, or a launch command after `--`", ctx)
        from ddpdoctor.launch.command_line import read_launch_line

        return read_launch_line(behind, os.environ)
    if behind:
        from ddpdoctor.launch.command_line import looks_like_launch

        if looks_like_launch(behind):
            raise UsageError(
                f"both {named} and a launch command are given",
                f"Either `ddpdoctor check -- {' '.join(behind)}`, or put only the script's own arguments after `--`.",
            )
    from ddpdoctor.launch.request import Launch, LaunchLine

    return LaunchLine(target=named, arguments=behind, launch=Launch(module=module is not None))


def script_path(line: LaunchLine) -> Path:
    """Return the file that is examined; raises UsageError when there is no such module."""
    if not line.launch.module:
        return Path(line.target)
    from ddpdoctor.launch.rehearsal_plan import module_places
    from ddpdoctor.source.script.project import find_main

    return find_main(line.target, module_places(line.launch, None, static=True))[1].path


SCRIPT_ARGUMENTS = "ddpdoctor.script_arguments"
"""Key in ``Context.meta`` of what stood behind ``--``."""
OWN_WORDS = "ddpdoctor.own_words"
"""Key in ``Context.meta`` of what stood before it."""

MOST_PROCESSES = 1024
"""Ranks to start, or processes that read."""
LONGEST_S = 604_800.0
"""A week; waiting for more than 292 years is beyond what the clock can hold."""

_SHARE = regex(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*(%?)\s*")

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

    from ddpdoctor.launch.kept_runs import kept_runs

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


class Share(click.types.FloatParamType):
    """A share of something, as ``5%`` or ``0.05``."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read the share; raises BadParameter."""
        match = _SHARE.fullmatch(str(value))
        if match is None:
            self.fail(f"{value} is not a share: write it as 5% or 0.05", param, ctx)
        return float(match[1]) / (100 if match[2] else 1)


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


def options_of(command: click.Command) -> list[click.Option]:
    """Return the options of a command, without its arguments."""
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


class ScriptCommand(click.Command):
    """A command that runs a script: everything behind ``--`` is the script's, or a launch command, unparsed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put what stands behind the first ``--`` aside and parse the rest."""
        own, script_arguments = args, []
        if "--" in args:
            divide = args.index("--")
            own, script_arguments = args[:divide], args[divide + 1 :]
        ctx.meta[SCRIPT_ARGUMENTS] = tuple(script_arguments)
        ctx.meta[OWN_WORDS] = tuple(own)
        # Its value is optional, and click would take the script's path for it.
        return super().parse_args(ctx, ["--resume=after" if word == "--resume" else word for word in own])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Show in the usage where the script's arguments go."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGUMENT...]"]


# A command line whose script takes all that is not an option of ours: `profile train.py --lr 0.1 --no-tui`.

SCRIPT = "ddpdoctor.script"
"""Key in ``Context.meta`` of the script's path; absent when none is named."""


class JobCommand(click.Command):
    """A command that starts a script, or whatever stands behind ``--``.

    Options of ours count before the script and behind it; other words behind it, and all behind ``--``, are its own.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Divide the words into ours and the script's, and parse ours."""
        divide = args.index("--") if "--" in args else len(args)
        ours, script, theirs = self._divided(args[:divide])
        ctx.meta[SCRIPT_ARGUMENTS] = (*theirs, *args[divide + 1 :])
        if script is not None:
            ctx.meta[SCRIPT] = script
        return super().parse_args(ctx, ours)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Show in the usage what may follow the options."""
        return [*super().collect_usage_pieces(ctx), "[SCRIPT [ARGUMENT]... | -- COMMAND...]"]

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete our options, and files: the script, or what its command names."""
        from click.shell_completion import CompletionItem

        return super().shell_complete(ctx, incomplete) or [CompletionItem(incomplete, type="file")]

    def _divided(self, words: list[str]) -> tuple[list[str], str | None, list[str]]:
        valued, flags = self._names()
        ours: list[str] = []
        theirs: list[str] = []
        script: str | None = None
        module = False
        left = list(words)
        while left:
            word = left.pop(0)
            name = word.partition("=")[0] if word.startswith("--") else word
            if name in flags or name in valued:
                ours.append(word)
                if name in valued and "=" not in word and left:
                    ours.append(left.pop(0))
                module = module or name in ("-m", "--module")
            elif script is not None or (module and not word.startswith("-")):
                theirs.append(word)
            elif module or word.startswith("-"):
                (theirs if module else ours).append(word)
            else:
                script = word
        return ours, script, theirs

    def _names(self) -> tuple[set[str], set[str]]:
        """Return the options that take a value, and those that take none."""
        options = options_of(self)
        valued = {name for option in options if not option.is_flag for name in option.opts}
        return valued, {name for option in options if option.is_flag for name in option.opts}


MOST_SAMPLES = 1_000_000_000
"""Of a batch, and batches of a pass."""


def rehearsal_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add how many ranks, batches and samples, on what, and with what held back.

    The command takes them as one mapping, ``how``: fields of ``ExamineRequest``.
    """
    from ddpdoctor.launch.request import DEVICES, FEWEST_RANKS, MOST_RANKS, parse_layout

    @functools.wraps(function)
    def gathered(*arguments: Any, **given: Any) -> Any:
        how = {name: given.pop(name) for name in names}
        source = click.get_current_context().get_parameter_source("nproc")
        if how["layout"] is not None and source is ParameterSource.COMMANDLINE:
            raise UsageError("either `--layout` or `--nproc`, not both: a layout sets the number of ranks")
        return function(*arguments, how=how, **given)

    others = len(getattr(gathered, "__click_params__", ()))
    _all(
        gathered,
        click.option(
            "--nproc",
            type=click.IntRange(min=FEWEST_RANKS, max=MOST_RANKS),
            default=2,
            show_default=True,
            metavar="N",
            help="Maximum number of ranks in the rehearsal; as many as the command starts, up to 8, where the script "
            "does not start on fewer.",
        ),
        click.option(
            "--layout",
            metavar="NODESxRANKS",
            callback=lambda ctx, parameter, value: None if value is None else parse_layout(value),
            help="Pretend NODESxRANKS, such as 2x1: two nodes with one rank each.",
        ),
        click.option(
            "--batches",
            type=click.IntRange(min=1, max=MOST_SAMPLES),
            default=4,
            show_default=True,
            metavar="N",
            help="Batches that a pass over a loader yields before it is cut short.",
        ),
        click.option(
            "--batch-size",
            default="auto",
            show_default=True,
            metavar="auto|keep|N",
            callback=lambda ctx, parameter, value: _samples(value),
            help=(
                "Number of samples to which batches are cut; by default 4 on the stand-in, where the CPU does the "
                "GPU's work."
            ),
        ),
        click.option(
            "--python", metavar="PATH", help="Python interpreter of the ranks; by default, one that has torch."
        ),
        click.option(
            "--device",
            type=click.Choice(DEVICES),
            default="auto",
            show_default=True,
            help="Device of the ranks; the stand-in emulates CUDA and NCCL on the CPU.",
        ),
        click.option(
            "--overlay/--no-overlay",
            default=True,
            help="Redirect the script's writes to an overlay that is discarded, where the kernel allows one; without "
            "it, the script writes to the real files and is stopped before it changes an existing one.  "
            "[default: overlay]",
        ),
        click.option(
            "--network/--no-network",
            default=None,
            help="Let the script reach the network and this machine's ports. By default it reaches neither where it "
            "runs in an overlay.  [default: no-network]",
        ),
        click.option(
            "--allow-socket",
            "sockets",
            multiple=True,
            metavar="PATH",
            callback=lambda ctx, parameter, value: tuple(map(_socket, value)),
            help="Let the script reach the program that listens on this Unix socket, such as a data server of the job.",
        ),
        click.option(
            "--pretend/--no-pretend",
            default=True,
            help=(
                "Replace torchvision data sets, image folders, pretrained weights and trackers that are missing on "
                "this machine by generated ones.  [default: pretend]"
            ),
        ),
        click.option("--allow-writes", is_flag=True, help="Allow the script to change existing files."),
    )
    names = [parameter.name for parameter in vars(gathered)["__click_params__"][others:]]
    return gathered


def judging_options(function: Decorated) -> Decorated:
    """Return which checks count, and from which severity on."""
    from ddpdoctor.finding import Severity

    return _all(
        function,
        click.option(
            "--select",
            multiple=True,
            metavar="CHECKS",
            help="Run only these checks: codes, code prefixes, or names.",
        ),
        click.option("--ignore", multiple=True, metavar="CHECKS", help="Do not run these checks."),
        click.option(
            "--fail-on",
            type=click.Choice([severity.value for severity in Severity]),
            help="The lowest severity that sets exit code 1.  [default: warning]",
        ),
    )


def _socket(path: str) -> Path:
    """Return the absolute path of a Unix socket; raises UsageError where there is none."""
    found = Path(path).absolute()
    if not found.is_socket():
        raise UsageError(f"--allow-socket {path}: no socket is there", "Start the program that listens on it first.")
    return found


def words(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of options that take several, separated by commas or given again."""
    return tuple(word.strip() for value in values for word in value.split(",") if word.strip())


def _all(function: Decorated, *options: Callable[[Decorated], Decorated]) -> Decorated:
    for option in reversed(options):
        function = option(function)
    return function


def _samples(value: str) -> int | None:
    """Return the size that batches are cut to; 0 to keep them as they are, None to let the device decide."""
    if value in ("auto", "keep"):
        return None if value == "auto" else 0
    if not re.fullmatch("[0-9]{1,10}", value) or not 1 <= int(value) <= MOST_SAMPLES:
        problem = f"{value} is not `auto`, `keep` or a number of samples up to {MOST_SAMPLES:,}"
        raise click.BadParameter(problem, param_hint="'--batch-size'")
    return int(value)
