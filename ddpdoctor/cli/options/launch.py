"""Which script the command line means, and how it is started: a path, a module, or a launch command behind ``--``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ddpdoctor.cli.options.command import SCRIPT_ARGUMENTS
from ddpdoctor.errors import UsageError
from ddpdoctor.launch.request import Launch, LaunchLine


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
        from ddpdoctor.launch.command.command_line import read_launch_line

        return read_launch_line(behind, os.environ)
    if behind and _is_launch_line(behind):
        raise UsageError(
            f"both {named} and a launch command are given",
            f"Either `ddpdoctor check -- {' '.join(behind)}`, or put only the script's own arguments after `--`.",
        )
    return LaunchLine(target=named, arguments=behind, launch=Launch(module=module is not None))


def _is_launch_line(words: tuple[str, ...]) -> bool:
    from ddpdoctor.launch.command.command_line import looks_like_launch

    return looks_like_launch(words)


def script_path(line: LaunchLine) -> Path:
    """Return the file that is examined; raises UsageError when there is no such module."""
    if not line.launch.module:
        return Path(line.target)
    from ddpdoctor.launch.rehearsal_plan import module_places
    from ddpdoctor.source.script.project import find_main

    return find_main(line.target, module_places(line.launch, None, static=True))[1].path
