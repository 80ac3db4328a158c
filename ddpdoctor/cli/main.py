"""The ``ddpdoctor`` command: finds the sub-command, and turns errors into exit codes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from importlib import import_module
from types import FrameType
from typing import NoReturn

import click

from ddpdoctor import __version__
from ddpdoctor.cli.options.command import ScriptCommand, help_option, result_option
from ddpdoctor.errors import DdpDoctorError, ExitCode, UsageError
from ddpdoctor.report import streams

COMMANDS = {
    "check": "ddpdoctor.cli.check",
    "gate": "ddpdoctor.cli.gate",
    "profile": "ddpdoctor.cli.profile",
    "autopsy": "ddpdoctor.cli.autopsy",
    "report": "ddpdoctor.cli.report",
    "what-if": "ddpdoctor.cli.what_if",
    "compare": "ddpdoctor.cli.compare",
    "scaling": "ddpdoctor.cli.scaling",
    "clean": "ddpdoctor.cli.clean",
    "explain": "ddpdoctor.cli.explain",
}
"""Module of each sub-command, imported when it is asked for; the command has the name of its module."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the commands in the order of a user's day."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None when there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(COMMANDS[cmd_name]), cmd_name.replace("-", "_"))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command; a wrong one gets the nearest, a script in its place the command that it needs."""
        if not args or args[0] in COMMANDS:
            return super().resolve_command(ctx, args)
        word = args[0]
        if word.endswith(".py"):
            raise click.UsageError(f"no such command: {word}; did you mean `ddpdoctor check {word}`?", ctx)
        from difflib import get_close_matches

        close = get_close_matches(word, COMMANDS, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise click.UsageError(f"no such command: {word}{meant}", ctx)


@click.group(cls=LazyGroup, add_help_option=False, no_args_is_help=False, invoke_without_command=True)
@result_option("--version", help="Show the version and exit.", text=lambda ctx: f"ddpdoctor {__version__}")
@help_option()
@click.pass_context
def ddpdoctor(ctx: click.Context) -> None:
    """A doctor for PyTorch DistributedDataParallel jobs."""
    if ctx.invoked_subcommand is None:
        streams.say(ctx.get_help())
        ctx.exit(ExitCode.ERROR)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (by default the process's) and return the exit code; raises nothing."""
    streams.occupy_closed()
    if threading.current_thread() is not threading.main_thread():
        return _run(arguments)
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _run(arguments)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        _demand_working_directory()
        code = ddpdoctor.main(arguments, prog_name="ddpdoctor", standalone_mode=False)
        return int(code or ExitCode.CLEAN)
    except click.ClickException as error:
        return _say_usage(error)
    except DdpDoctorError as error:
        return _report_error(error)
    except (click.Abort, KeyboardInterrupt):
        streams.say("interrupted")
        return ExitCode.INTERRUPTED
    except MemoryError:
        return _report_error(DdpDoctorError("out of memory"))
    except OSError as error:
        if error.filename is None:
            return _say_defect()
        return _report_error(DdpDoctorError(f"{os.fsdecode(error.filename)}: {error.strerror or error}"))
    except Exception:
        return _say_defect()


def _report_error(error: DdpDoctorError) -> int:
    streams.say_error(error)
    return error.exit_code


def _say_defect() -> int:
    from traceback import format_exc

    streams.say(f"{format_exc()}error: this is a defect of ddpdoctor {__version__}, not of your script")
    return ExitCode.ERROR


def _demand_working_directory() -> None:
    """Raise UsageError when the working directory was deleted: paths that are relative mean nothing then."""
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the working directory cannot be used: {error.strerror}",
            "It was deleted or moved: `cd` into an existing directory.",
        ) from error


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """End on SIGTERM as on Ctrl-C: with everything that was started."""
    raise KeyboardInterrupt


def _say_usage(error: click.ClickException) -> int:
    lines = [f"error: {streams.one_sentence(error.format_message())}"]
    context = getattr(error, "ctx", None)
    if context is not None:
        lines += [context.get_usage(), f"hint:  `{context.command_path} --help` lists the options."]
        if isinstance(context.command, ScriptCommand):
            lines.append("       Arguments of the script itself go after `--`.")
    streams.say("\n".join(lines))
    return ExitCode.ERROR
