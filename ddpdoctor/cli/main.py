"""The ``ddpdoctor`` command: finds the sub-command, and turns errors into exit codes."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Sequence
from importlib import import_module
from types import FrameType
from typing import NoReturn

import click

from ddpdoctor import __version__
from ddpdoctor.cli.options import ScriptCommand, help_option, result_option
from ddpdoctor.errors import DdpDoctorError, ExitCode, UsageError
from ddpdoctor.report import streams

COMMANDS = {
    "check": "Examine a script: read its source, rehearse it on a few ranks for a few batches, and report what is"
    " wrong.",
    "gate": "Examine scripts as `check` does, and compare with a committed baseline: for CI.",
    "profile": "Run a job under observation, or attach to a running one.",
    "autopsy": "Explain why a job died, from its logs (any launcher), error files and flight-recorder dumps.",
    "report": "Show what was recorded of RUN: a run directory, or the name of a kept run; by default the newest.",
    "runs": "List the kept runs of watched jobs, newest first, with the names that other commands take.",
    "what-if": "Predict the gain of changes to RUN: a run directory, or the name of a kept run; by default the newest.",
    "compare": "Compare two recorded runs of a job, BEFORE and AFTER: run directories, or names of kept runs.",
    "scaling": "Run SCRIPT on several numbers of ranks on this machine, and report how it scales.",
    "clean": "Show what killed rehearsals left in your directories, and remove it after confirmation.",
    "completion": "Print the script with which bash, zsh or fish completes commands, runs and checks.",
    "schema": "Print the JSON Schema of the JSON that COMMAND writes.",
    "explain": "Explain CHECK, a code or a name; without one, list all checks.",
}
"""What each sub-command does, as its own help begins; its module has the same name, but for these."""
_MODULES = {"runs": "report", "what_if": "report", "compare": "report", "completion": "explain"}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the commands in the order of a user's day."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None when there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(import_module(f"ddpdoctor.cli.{_MODULES.get(name, name)}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what each command does, whole, without importing it."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

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
    if arguments is None:
        # Modules and trees hold few cycles: looking for them as often as usual took 20 of 204 ms for a script of 500
        # lines. Not set back: the process ends with us, and a last look would take 12 ms.
        gc.set_threshold(50_000, *gc.get_threshold()[1:])
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
