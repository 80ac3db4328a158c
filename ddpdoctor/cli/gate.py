"""``ddpdoctor gate``: keep what would hang, or talks more than it did, out of a project."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ddpdoctor.cli.options import (
    OWN_WORDS,
    SCRIPT_ARGUMENTS,
    ScriptCommand,
    Seconds,
    Share,
    help_option,
    judging_options,
    launch_line,
    options_of,
    paths_argument,
    rehearsal_options,
    script_path,
    words,
)
from ddpdoctor.cli.output import ExaminationOutput, output_options
from ddpdoctor.config import Settings, find_settings
from ddpdoctor.errors import ConfigurationError, UsageError
from ddpdoctor.examine.one_script import ExamineRequest
from ddpdoctor.examine.run_gate import GateRequest, GateTarget, Mode, run_gate, target_of
from ddpdoctor.finding import Severity
from ddpdoctor.gate.baseline import DEFAULT_FILE
from ddpdoctor.gate.budget import together
from ddpdoctor.launch.request import Launch, LaunchLine
from ddpdoctor.report import streams

_OWN_CHECKS = {"DDP901": "budget-growth", "DDP902": "lost-reach", "DDP903": "step-time-growth"}
_SAID_ELSEWHERE = (
    "-m", "--module", "--update", "--prune", "-o", "--output", "--output-format", "--report", "--force", "--no-color",
)  # fmt: skip
"""Options that a command to be pasted says itself, or that are about where this report goes."""


@click.command(cls=ScriptCommand, add_help_option=False)
@paths_argument("scripts", "[SCRIPT...]")
@click.option(
    "-m", "--module", metavar="NAME", help="Examine a module as `python -m NAME` runs it, instead of a script."
)
@click.option("--watch", is_flag=True, help="Run the COMMAND after `--` itself, and end it as soon as it hangs.")
@click.option(
    "--baseline", metavar="FILE", help=f"The baseline file; commit it with the project.  [default: {DEFAULT_FILE}]"
)
@click.option("--update", is_flag=True, help="Write the baseline: accept the current findings and budget.")
@click.option("--prune", is_flag=True, help="Remove from the baseline what is no longer found or needed; add nothing.")
@click.option("--against", metavar="REV", help="Compare with another git revision instead of a baseline.")
@click.option(
    "--allowed-time-growth",
    metavar="SHARE",
    type=Share(),
    help="With --against: the share by which a step may become slower, such as 5%; timed in pairs of rehearsals.",
)
@click.option(
    "--pairs",
    type=click.IntRange(min=3, max=100),
    default=5,
    show_default=True,
    metavar="N",
    help="Pairs of rehearsals for --allowed-time-growth.",
)
@click.option(
    "--equivalence",
    is_flag=True,
    help="Compare the gradients with those of one process, too; with --update the baseline asks for it from then on.",
)
@click.option(
    "--allowed-growth",
    metavar="SHARE",
    type=Share(),
    help="The share by which each figure of the budget may grow.  [default: 0]",
)
@click.option(
    "--time-limit",
    type=Seconds(0, least_open=True),
    metavar="SECONDS",
    help="Stop everything after this time, and report.  [default: 600; with --watch none]",
)
@rehearsal_options
@judging_options
@output_options
@help_option()
@click.pass_context
def gate(
    ctx: click.Context,
    scripts: tuple[str, ...],
    module: str | None,
    watch: bool,
    baseline: str | None,
    update: bool,
    prune: bool,
    against: str | None,
    allowed_time_growth: float | None,
    pairs: int,
    equivalence: bool,
    allowed_growth: float | None,
    time_limit: float | None,
    how: Mapping[str, Any],
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    fail_on: str | None,
    wanted: ExaminationOutput,
) -> None:
    """Examine scripts as `check` does, and compare with a committed baseline: for CI.

    The gate fails on what the baseline lacks: a new finding, a step with more collectives, bytes, synchronised
    backwards or host synchronisations, more batches or samples per rank, a larger model state, code that the rehearsal
    no longer reaches; and always on a hang, a mismatch, or a rehearsal that does not run to its end.

    Arguments after `--` go to the script; without SCRIPT they are the command that launches the job. Without either,
    the `targets` in [tool.ddpdoctor.gate] are examined.

    Exit code: 0 as agreed on, 1 red, 2 wrong usage, 3 inconclusive, 130 interrupted.
    """
    modes = {"--watch": watch, "--update": update, "--prune": prune, "--against": against is not None}
    named = [name for name, is_given in modes.items() if is_given]
    if len(named) > 1:
        raise UsageError(f"either {named[0]} or {named[1]}, not both")
    if allowed_time_growth is not None and against is None:
        raise UsageError("`--allowed-time-growth` goes with `--against`", "Times of other machines cannot be compared.")
    if watch:
        named = [*scripts, *([module] if module else [])]
        ctx.exit(_watched(ctx, named, wanted, time_limit, Severity(fail_on) if fail_on else None))
    settings = find_settings(Path.cwd())
    lines = _targets(ctx, scripts, module, settings)
    wanted.refuse([script_path(target.line) for target in lines])
    file = baseline or settings.gate.baseline or DEFAULT_FILE
    directory = settings.directory if not baseline and settings.gate.baseline else Path.cwd()
    mode: Mode = "update" if update else "prune" if prune else "compare"
    request = GateRequest(
        targets=lines,
        how=ExamineRequest(
            target="",
            **how,
            equivalence=equivalence,
            select=words(select),
            ignore=words(ignore),
            fail_on=Severity(fail_on) if fail_on else settings.fail_on or Severity.WARNING,
            settings=settings,
        ),
        baseline=directory / file,
        shown_baseline=file,
        options=_given(ctx),
        mode=mode,
        against=against or "",
        allowed_growth=_first(allowed_growth, settings.gate.allowed_growth, 0.0),
        allowed_time_growth=allowed_time_growth,
        pairs=pairs,
        time_limit_s=_first(time_limit, settings.gate.time_limit_s, 600.0),
        ignored=frozenset(code for code in _OWN_CHECKS if _is_named(code, words(ignore) or settings.ignore)),
    )
    with streams.live_progress() as show:
        examinations = run_gate(request, show)
    examination = together(examinations)
    wanted.write(examination)
    ctx.exit(examination.exit_code)


def _given(ctx: click.Context) -> tuple[str, ...]:
    """Return the options of the command line that say how to examine and to compare, as they were written."""
    takes_value = {name: not option.is_flag for option in options_of(ctx.command) for name in option.opts}
    words = list(ctx.meta[OWN_WORDS])
    given: list[str] = []
    while words:
        name, joined, _ = words[0].partition("=") if words[0].startswith("--") else (words[0][:2], words[0][2:], "")
        option = [words.pop(0)]
        if takes_value.get(name) and not joined and words:
            option.append(words.pop(0))
        if name.startswith("-") and name not in _SAID_ELSEWHERE:
            given += option
    return tuple(given)


def _watched(
    ctx: click.Context,
    named: list[str],
    wanted: ExaminationOutput,
    time_limit_s: float | None,
    fail_on: Severity | None,
) -> int:
    from ddpdoctor.cli.live.gate_watch import watch_command

    words: tuple[str, ...] = ctx.meta[SCRIPT_ARGUMENTS]
    if named or not words:
        raise UsageError(
            "`--watch` takes the whole command after `--`",
            "As in `ddpdoctor gate --watch -- torchrun --nproc-per-node 2 train.py` or `-- pytest tests`.",
        )
    wanted.refuse()
    return watch_command(words, wanted, time_limit_s=time_limit_s, fail_on=fail_on)


def _targets(
    ctx: click.Context, scripts: tuple[str, ...], module: str | None, settings: Settings
) -> tuple[GateTarget, ...]:
    behind: tuple[str, ...] = ctx.meta[SCRIPT_ARGUMENTS]
    if len(scripts) > 1 and behind:
        raise UsageError(
            "arguments after `--` apply to one script, but several are named",
            "Give each its command line in `targets` of [tool.ddpdoctor.gate].",
        )
    if len(scripts) > 1:
        return tuple(target_of(LaunchLine(target=script, arguments=(), launch=Launch())) for script in scripts)
    if scripts or module is not None or behind:
        line = launch_line(ctx, scripts, module)
        return (target_of(line, () if scripts or module is not None else behind),)
    if not settings.gate.targets:
        raise click.UsageError("give a script, a launch command after `--`, or `targets` in [tool.ddpdoctor.gate]", ctx)
    if settings.directory.resolve() != Path.cwd().resolve():
        raise UsageError(
            f"the targets in {settings.file} are relative to its directory", f"Run it there: `cd {settings.directory}`."
        )
    return tuple(_read_target(text, settings.file) for text in settings.gate.targets)


def _read_target(text: str, file: str) -> GateTarget:
    from ddpdoctor.launch.command_line import read_launch_line

    try:
        split = tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigurationError(f"{file}: the target {text!r} is not a command line: {error}") from error
    if not split:
        raise ConfigurationError(f"{file}: a target is empty", 'As in `targets = ["train.py --epochs 2"]`.')
    if split[0].endswith(".py"):
        return target_of(LaunchLine(target=split[0], arguments=split[1:], launch=Launch()), split)
    if split[0] == "-m" and len(split) > 1:
        return target_of(LaunchLine(target=split[1], arguments=split[2:], launch=Launch(module=True)), split)
    return target_of(read_launch_line(split, os.environ), split)


def _is_named(code: str, chosen: tuple[str, ...]) -> bool:
    return any(word.upper() == code or word.lower() == _OWN_CHECKS[code] or word.upper() == "DDP9" for word in chosen)


def _first(*values: float | None) -> float:
    return next((value for value in values if value is not None), 0.0)
