"""``ddpdoctor check``: examine a script before it is launched."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import click
from click.core import ParameterSource

from ddpdoctor.check import LoadedCheck
from ddpdoctor.cli.command import MOST_PROCESSES, ScriptCommand, Seconds, help_option
from ddpdoctor.cli.launching import launch_line, script_path
from ddpdoctor.config.settings import find_settings
from ddpdoctor.errors import UnreadableScript, UsageError
from ddpdoctor.examination import Examination
from ddpdoctor.examine import ExamineRequest, examine, unreadable
from ddpdoctor.finding import Severity
from ddpdoctor.further import STRESSES
from ddpdoctor.launch.devices import DEVICES, Device
from ddpdoctor.launch.layouts import FEWEST_RANKS, MOST_RANKS, Layout, parse_layout
from ddpdoctor.launch.request import Stress
from ddpdoctor.report import streams
from ddpdoctor.report.formats import FOR_PEOPLE, FORMATS, rendered
from ddpdoctor.report.output_file import STEP_SUMMARY, OutputFile, append_step_summary, refuse_step_summary
from ddpdoctor.report.own_reports import encoded
from ddpdoctor.source_text import MAXIMUM_BYTES

STDIN = "-"
MOST_SAMPLES = 1_000_000_000
"""Of a batch, and batches of a pass."""


@click.command(cls=ScriptCommand, add_help_option=False)
@click.argument("paths", metavar="[PATH...]", nargs=-1)
@click.option("-m", "--module", metavar="NAME", help="Examine what `python -m NAME` runs, instead of a script.")
@click.option("--static", is_flag=True, help="Read the source only; run nothing and need no torch.")
@click.option("--fix", is_flag=True, help="Make the fixes that are safe, and report what is left. Implies --static.")
@click.option("--diff", is_flag=True, help="Show what --fix would do, and change nothing. Implies --static.")
@click.option(
    "--nproc",
    type=click.IntRange(min=FEWEST_RANKS, max=MOST_RANKS),
    default=2,
    show_default=True,
    metavar="N",
    help="Ranks of the rehearsal at most.",
)
@click.option(
    "--layout",
    metavar="NODESxRANKS",
    callback=lambda ctx, parameter, value: None if value is None else parse_layout(value),
    help="Pretend several nodes with so many ranks each, such as 2x1.",
)
@click.option(
    "--stress",
    type=click.Choice((*STRESSES, "all")),
    multiple=True,
    help="After a clean rehearsal another one, in which one rank meets this.",
)
@click.option("--thorough", is_flag=True, help="After a clean rehearsal: one as 2x1, and every --stress.")
@click.option(
    "--batches",
    type=click.IntRange(min=1, max=MOST_SAMPLES),
    default=4,
    show_default=True,
    metavar="N",
    help="Batches that a pass over a loader yields before it is cut.",
)
@click.option("--full", is_flag=True, help="Cut no pass: rehearse the script as it is, to its end.")
@click.option(
    "--batch-size",
    default="auto",
    show_default=True,
    metavar="auto|keep|N",
    callback=lambda ctx, parameter, value: _samples(value),
    help="Samples that a loader's batches are cut to; by default 4 on the stand-in, where a CPU does a GPU's work.",
)
@click.option(
    "--time-limit",
    type=Seconds(0, least_open=True),
    metavar="SECONDS",
    help="End the rehearsal after this time.  [default: 120, more when ranks share a core]",
)
@click.option(
    "--stall-after",
    type=Seconds(1),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="Call a rank stuck that others wait for and that has shown no sign of life for this time.",
)
@click.option("--python", metavar="PATH", help="Interpreter of the ranks; by default one that has torch is looked for.")
@click.option(
    "--device",
    type=click.Choice(DEVICES),
    default="auto",
    show_default=True,
    help="What the ranks run on; the stand-in serves CUDA and NCCL from the CPU.",
)
@click.option(
    "--overlay/--no-overlay",
    default=True,
    help="Let the script write to an overlay that is thrown away, where the kernel allows one; without it, it writes "
    "to the real files, and is stopped where it would change one that was there before.  [default: overlay]",
)
@click.option("--network/--no-network", default=True, help="Keep the script from the network, but for the loopback.")
@click.option("--allow-writes", is_flag=True, help="Let the script change files that were there before, for real.")
@click.option("--keep", is_flag=True, help="Keep the files that the rehearsal makes, and say where they are.")
@click.option(
    "--select", multiple=True, metavar="CHECKS", help="Run these checks only: codes, prefixes of codes, or names."
)
@click.option("--ignore", multiple=True, metavar="CHECKS", help="Do not run these checks.")
@click.option(
    "--fail-on",
    type=click.Choice([severity.value for severity in Severity]),
    help="The mildest severity that makes the exit code 1.  [default: warning]",
)
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave these out of the directories to examine.")
@click.option("--force-exclude", is_flag=True, help="Leave excluded files out even where they are named.")
@click.option("--stdin-filename", metavar="FILE", help="The file that the source on stdin (`-`) stands for.")
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(min=0, max=MOST_PROCESSES),
    default=1,
    show_default=True,
    metavar="N",
    help="Processes that read sources; 0 for one a core.",
)
@click.option(
    "--output-format",
    type=click.Choice(FORMATS),
    default="full",
    show_default=True,
    help="Text for people, one line a finding, JSON, or what CI servers read.",
)
@click.option("-o", "--output", metavar="FILE", help="Write the report to a file instead of stdout.")
@click.option("--force", is_flag=True, help="Let -o overwrite a file that is not a report of ddpdoctor.")
@click.option("--no-color", is_flag=True, help="No colours; NO_COLOR in the environment does the same.")
@help_option()
@click.pass_context
def check(
    ctx: click.Context,
    paths: tuple[str, ...],
    module: str | None,
    static: bool,
    fix: bool,
    diff: bool,
    nproc: int,
    layout: Layout | None,
    stress: tuple[Stress | Literal["all"], ...],
    thorough: bool,
    batches: int,
    full: bool,
    batch_size: int | None,
    time_limit: float | None,
    stall_after: float,
    python: str | None,
    device: Device,
    overlay: bool,
    network: bool,
    allow_writes: bool,
    keep: bool,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    fail_on: str | None,
    exclude: tuple[str, ...],
    force_exclude: bool,
    stdin_filename: str | None,
    jobs: int,
    output_format: str,
    output: str | None,
    force: bool,
    no_color: bool,
) -> None:
    """Examine a script: read its source, rehearse it on a few ranks for a few batches, and say what is wrong.

    What stands behind `--` goes to the script; with neither PATH nor --module it is the command that launches the job,
    as in `ddpdoctor check -- torchrun --nproc-per-node 8 train.py`. With --static also several scripts, directories
    (their entry scripts are found), or stdin (`-`). Files that were there before are changed by --fix and
    --allow-writes only.

    Exit code: 0 nothing found, 1 findings, 2 wrong usage, 3 inconclusive, 130 interrupted.
    """
    line = launch_line(ctx, paths, module)
    if layout is not None and ctx.get_parameter_source("nproc") is ParameterSource.COMMANDLINE:
        raise UsageError("either `--layout` or `--nproc`, not both: a layout says how many ranks there are")
    if fix and diff:
        raise UsageError("either --fix or --diff, not both")
    if fix and STDIN in paths:
        raise UsageError("`--fix` has no file to write stdin to", "`--diff` shows what it would do.")
    sources = (*map(Path, paths), script_path(line)) if output is not None or output_format == "github" else ()
    file = None if output is None else OutputFile(output, force=force, sources=sources)
    if file is None:
        streams.demand_stdout()
    else:
        file.refuse()
    summary = os.environ.get(STEP_SUMMARY) if output_format == "github" and not diff else None
    if summary:
        refuse_step_summary(summary, sources)
    threshold = Severity(fail_on) if fail_on else None
    words, ignored = _words(select), _words(ignore)
    for_people = output_format in FOR_PEOPLE
    if fix or diff:
        paths = paths or (str(script_path(line)),)
    if fix or diff or _is_survey(paths, force_exclude=force_exclude, static=static):
        from ddpdoctor.cli import fixing
        from ddpdoctor.survey import SurveyRequest, survey

        request = SurveyRequest(
            paths=paths,
            stdin=streams.read_stdin(MAXIMUM_BYTES) if STDIN in paths else None,
            stdin_name=stdin_filename or "stdin.py",
            select=words,
            ignore=ignored,
            fail_on=threshold,
            exclude=exclude,
            force_exclude=force_exclude,
            jobs=jobs or os.cpu_count() or 1,
            fixes=fix or diff,
            hint=output_format == "full",
        )
        if diff:
            found, text = fixing.shown(request)
            _write(text, file, "diff")
            ctx.exit(found.examination.exit_code)
        survey_of = fixing.fixed if fix else survey
        one = ExamineRequest(target=request.stdin_name if STDIN in paths else paths[0])
        examination = _examined(lambda: survey_of(request).examination, one, for_people=for_people)
    else:
        single = ExamineRequest(
            target=line.target,
            arguments=line.arguments,
            launch=line.launch,
            static=static,
            hint=output_format == "full",
            nproc=nproc,
            layout=layout,
            stress=tuple(kind for kind in STRESSES if kind in stress or "all" in stress),
            thorough=thorough,
            batches=batches,
            full=full,
            batch_size=batch_size,
            time_limit_s=time_limit,
            stall_after_s=stall_after,
            python=python,
            device=device,
            overlay=overlay,
            network=network,
            allow_writes=allow_writes,
            keep=keep,
            select=words,
            ignore=ignored,
        )
        examination = _examined(lambda: _examined_script(single, threshold), single, for_people=for_people)
    colour = file is None and streams.colours_wanted(no_color)
    width = streams.PLAIN_WIDTH if file is not None else streams.result_width()
    _write(rendered(examination, output_format, _checks_of, width, colour=colour), file, output_format)
    if summary:
        from ddpdoctor.report import markdown

        append_step_summary(summary, encoded(markdown.render(examination)), sources)
    ctx.exit(examination.exit_code)


def _is_survey(paths: Sequence[str], *, force_exclude: bool, static: bool) -> bool:
    """Tell whether many sources are meant; raises UsageError when they would have to be rehearsed."""
    if not paths:
        return False
    many = len(paths) > 1 or paths[0] == STDIN or Path(paths[0]).is_dir()
    if many and not static:
        what = "several paths" if len(paths) > 1 else "stdin" if paths[0] == STDIN else f"{paths[0]} is a directory: it"
        raise UsageError(
            f"{what} can only be examined with `--static`",
            "A rehearsal runs one script: name the one that torchrun is given.",
        )
    return many or (static and force_exclude)


def _examined(examination: Callable[[], Examination], request: ExamineRequest, *, for_people: bool) -> Examination:
    try:
        return examination()
    except UnreadableScript as error:
        if for_people:
            raise
        return unreadable(request, error)  # Who reads a document gets one, whatever the script is.


def _examined_script(request: ExamineRequest, fail_on: Severity | None) -> Examination:
    from msgspec.structs import replace

    beside = Path.cwd() if request.launch.module else Path(request.target).absolute().parent
    settings = find_settings(beside)
    request = replace(request, settings=settings, fail_on=fail_on or settings.fail_on or Severity.WARNING)
    if request.static:
        return examine(request)
    from ddpdoctor.launch import leftovers

    if note := leftovers.told(leftovers.leftovers()):
        streams.say(note)
    with streams.live_progress() as show:
        return examine(request, show)


def _checks_of(examination: Examination) -> list[LoadedCheck]:
    from ddpdoctor.registry import find, load, read_catalogue

    catalogue = read_catalogue()
    return [load(find(catalogue, code)) for code in sorted({finding.code for finding in examination.findings})]


def _write(text: str, file: OutputFile | None, output_format: str) -> None:
    if file is None:
        streams.write_result(text)
        return
    try:
        file.write_text(text, output_format)
    except UsageError:
        streams.write_result(text)  # The minutes that it took are not lost.
        raise


def _samples(value: str) -> int | None:
    """The size that batches are cut to; 0 to keep them as they are, None to let the device decide."""
    if value in ("auto", "keep"):
        return None if value == "auto" else 0
    if not re.fullmatch("[0-9]{1,10}", value) or not 1 <= int(value) <= MOST_SAMPLES:
        problem = f"{value} is neither `auto` nor `keep` nor a number of samples up to {MOST_SAMPLES:,}"
        raise click.BadParameter(problem, param_hint="'--batch-size'")
    return int(value)


def _words(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word.strip() for value in values for word in value.split(",") if word.strip())
