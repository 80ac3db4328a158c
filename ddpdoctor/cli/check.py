"""``ddpdoctor check``: examine a script before it is launched."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec

from ddpdoctor.api import checked
from ddpdoctor.cli.options import (
    MOST_PROCESSES,
    ScriptCommand,
    Seconds,
    help_option,
    judging_options,
    launch_line,
    paths_argument,
    rehearsal_options,
    script_path,
    words,
)
from ddpdoctor.cli.output import ExaminationOutput, output_options
from ddpdoctor.errors import ExitCode, UnreadableScript, UsageError
from ddpdoctor.examination import Examination
from ddpdoctor.examine.one_script import ExamineRequest, refuse_contradictions, unreadable
from ddpdoctor.files.untrusted import MAXIMUM_BYTES
from ddpdoctor.finding import Severity, shown_path
from ddpdoctor.launch.request import STRESSES, Stress
from ddpdoctor.report import streams
from ddpdoctor.report.formats import FOR_PEOPLE

if TYPE_CHECKING:
    from ddpdoctor.examine.static_scan import Survey, SurveyRequest
    from ddpdoctor.fix import Fix

STDIN = "-"


@click.command(cls=ScriptCommand, add_help_option=False)
@paths_argument("paths", "[PATH...]")
@click.option(
    "-m", "--module", metavar="NAME", help="Examine a module as `python -m NAME` runs it, instead of a script."
)
@click.option("--static", is_flag=True, help="Read the source only: run nothing, torch is not needed.")
@click.option("--fix", is_flag=True, help="Apply the safe fixes and report what is left. Implies --static.")
@click.option("--diff", is_flag=True, help="Show what --fix would change, without changing it. Implies --static.")
@rehearsal_options
@click.option(
    "--stress",
    type=click.Choice((*STRESSES, "all")),
    multiple=True,
    help="After a clean rehearsal, run another in which one rank is put under this stress.",
)
@click.option(
    "--resume",
    type=click.Choice(("after", "torn")),
    metavar="[=torn]",
    help="Rehearse a restart from the script's own checkpoint, too, and compare it with a run that goes on; with "
    "`=torn` also one after a job that died while it saved.",
)
@click.option(
    "--resume-with",
    metavar="OPTION",
    help="Tell the script so to resume, as in '--resume-from {checkpoint}'. Implies --resume.",
)
@click.option(
    "--resume-ranks",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Restart on another number of ranks, and say what means something else then. Implies --resume.",
)
@click.option(
    "--equivalence/--no-equivalence",
    default=None,
    help="Compare the gradients of the ranks with those of one process on the same samples.  [default: after a short "
    "rehearsal that is clean]",
)
@click.option(
    "--against",
    metavar="COMMAND",
    help="Compare the gradients with those of another launch instead, as in 'torchrun train.py --fsdp'.",
)
@click.option(
    "--thorough",
    is_flag=True,
    help="After a clean rehearsal, run one as 2x1 and one for each --stress. Implies --equivalence.",
)
@click.option("--full", is_flag=True, help="Do not shorten passes: rehearse the whole script.")
@click.option(
    "--time-limit",
    type=Seconds(0, least_open=True),
    metavar="SECONDS",
    help="End the rehearsal after this time.  [default: 110, more when ranks share a core]",
)
@click.option(
    "--stall-after",
    type=Seconds(1),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="Report a rank as stuck once others wait for it and it has been inactive for this long.",
)
@click.option("--keep", is_flag=True, help="Keep the files that the rehearsal writes, and print where they are.")
@judging_options
@click.option(
    "--only-findings",
    is_flag=True,
    help="For hooks and editors: exit with 0 unless something is found, and say nothing of what holds no training.",
)
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Exclude these from the directories to examine.")
@click.option("--force-exclude", is_flag=True, help="Apply --exclude even to files that are named explicitly.")
@click.option("--stdin-filename", metavar="FILE", help="The file name to use for the source on stdin (`-`).")
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(min=0, max=MOST_PROCESSES),
    default=1,
    show_default=True,
    metavar="N",
    help="Number of processes that read sources; 0 means one per core.",
)
@output_options
@help_option()
@click.pass_context
def check(
    ctx: click.Context,
    paths: tuple[str, ...],
    module: str | None,
    static: bool,
    fix: bool,
    diff: bool,
    how: Mapping[str, Any],
    stress: tuple[Stress | Literal["all"], ...],
    resume: Literal["after", "torn"] | None,
    resume_with: str | None,
    resume_ranks: int | None,
    equivalence: bool | None,
    against: str | None,
    thorough: bool,
    full: bool,
    time_limit: float | None,
    stall_after: float,
    keep: bool,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    fail_on: str | None,
    only_findings: bool,
    exclude: tuple[str, ...],
    force_exclude: bool,
    stdin_filename: str | None,
    jobs: int,
    wanted: ExaminationOutput,
) -> None:
    """Examine a script: read its source, rehearse it on a few ranks for a few batches, and report what is wrong.

    Arguments after `--` go to the script; with neither PATH nor --module they are the command that launches the job,
    as in `ddpdoctor check -- torchrun --nproc-per-node 8 train.py`. With --static also several scripts, directories
    (their entry scripts are found), or stdin (`-`). Existing files are changed only with --fix and --allow-writes.

    Exit code: 0 nothing found, 1 findings, 2 wrong usage, 3 inconclusive (code that was not followed, or nothing of a
    distributed training), 130 interrupted.
    """
    line = launch_line(ctx, paths, module)
    if fix and diff:
        raise UsageError("either --fix or --diff, not both")
    if fix and STDIN in paths:
        raise UsageError("`--fix` cannot write to stdin", "`--diff` shows what it would do.")
    if diff and wanted.reports:
        raise UsageError("`--diff` writes no report", "Omit `--report`.")
    writes = wanted.file or wanted.reports or wanted.format == "github"
    wanted.refuse((*map(Path, paths), script_path(line)) if writes else ())
    threshold = Severity(fail_on) if fail_on else None
    selected, ignored = words(select), words(ignore)
    for_people = wanted.format in FOR_PEOPLE and not wanted.reports
    if fix or diff:
        paths = paths or (str(script_path(line)),)
    single = ExamineRequest(
        target=line.target,
        arguments=line.arguments,
        launch=line.launch,
        static=static,
        hint=wanted.format == "full",
        **how,
        stress=tuple(kind for kind in STRESSES if kind in stress or "all" in stress),
        resume=resume or ("after" if resume_with is not None or resume_ranks else ""),
        resume_with=resume_with,
        resume_ranks=resume_ranks or 0,
        equivalence=equivalence,
        against=against or "",
        thorough=thorough,
        full=full,
        time_limit_s=time_limit,
        stall_after_s=stall_after,
        keep=keep,
        select=selected,
        ignore=ignored,
    )
    if fix or diff or _is_survey(paths, force_exclude=force_exclude, static=static):
        from ddpdoctor.examine.static_scan import SurveyRequest, survey

        refuse_contradictions(msgspec.structs.replace(single, static=True))
        request = SurveyRequest(
            paths=paths,
            stdin=streams.read_stdin(MAXIMUM_BYTES) if STDIN in paths else None,
            stdin_name=stdin_filename or "stdin.py",
            select=selected,
            ignore=ignored,
            fail_on=threshold,
            exclude=exclude,
            force_exclude=force_exclude,
            jobs=jobs or os.cpu_count() or 1,
            fixes=fix or diff,
            hint=wanted.format == "full",
        )
        if diff:
            found, text = _shown(request)
            wanted.write_text(text, "diff")
            ctx.exit(found.examination.exit_code)
        survey_of = _fixed if fix else survey
        one = ExamineRequest(target=request.stdin_name if STDIN in paths else paths[0])
        examination = _examined(lambda: survey_of(request).examination, one, for_people=for_people)
    else:
        examination = _examined(lambda: _examined_script(single, threshold), single, for_people=for_people)
    if only_findings and examination.exit_code is ExitCode.INCONCLUSIVE:
        examination = msgspec.structs.replace(examination, exit_code=ExitCode.CLEAN)
        if not examination.recognised and for_people:
            ctx.exit(ExitCode.CLEAN)
    wanted.write(examination)
    ctx.exit(examination.exit_code)


def _is_survey(paths: Sequence[str], *, force_exclude: bool, static: bool) -> bool:
    """Return whether many sources are meant; raises UsageError when they would have to be rehearsed."""
    if not paths:
        return False
    many = len(paths) > 1 or paths[0] == STDIN or Path(paths[0]).is_dir()
    if many and not static:
        what = "several paths" if len(paths) > 1 else "stdin" if paths[0] == STDIN else f"{paths[0]} is a directory: it"
        raise UsageError(
            f"{what} can only be examined with `--static`",
            "A rehearsal runs one script: pass the one that you give to torchrun.",
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
    """Examine one script, with its progress on a terminal."""
    if request.static:
        # A walk of 50,000 collectives took 5.4 s in the place of 5.7 s; at most a million objects wait to be let go of.
        gc.set_threshold(1_000_000, *gc.get_threshold()[1:])
        return checked(request, fail_on)
    from ddpdoctor.launch import created_files

    if note := created_files.leftovers_text(created_files.leftovers()):
        streams.say(note)
    with streams.live_progress() as show:
        return checked(request, fail_on, show)


def _fixed(request: SurveyRequest) -> Survey:
    """Make the safe fixes and examine again what is left; raises UsageError when a file cannot be written."""
    from ddpdoctor.examine.static_scan import survey
    from ddpdoctor.fix import rewrite, write

    before = survey(request)
    files, left = rewrite(fix for fix in before.fixes if fix.safe)
    for file in files:
        write(file)
    made = sum(len(file.fixes) for file in files)
    if made:
        streams.say(f"made {_count(made, 'fix', 'fixes')} in {_count(len(files), 'file', 'files')}")
    _say_not_made([*left, *(fix for fix in before.fixes if not fix.safe)], before)
    return survey(msgspec.structs.replace(request, fixes=False)) if made else before


def _shown(request: SurveyRequest) -> tuple[Survey, str]:
    """Return the examination, and a unified diff of what ``--fix`` would do."""
    from ddpdoctor.examine.static_scan import survey
    from ddpdoctor.fix import difference, rewrite

    found = survey(request)
    root = found.examination.root
    held = {f"{root}/{request.stdin_name}": request.stdin or b""} if STDIN in request.paths else None
    files, left = rewrite((fix for fix in found.fixes if fix.safe), held)
    _say_not_made([*left, *(fix for fix in found.fixes if not fix.safe)], found, held)
    return found, "".join(difference(file, shown_path(file.file, root)) for file in files)


def _say_not_made(fixes: Sequence[Fix], found: Survey, held: dict[str, bytes] | None = None) -> None:
    """Say on stderr what was not made and why, with what it would change."""
    from ddpdoctor.fix import difference, rewrite

    for fix in fixes:
        where = f"{shown_path(fix.location.file, found.examination.root)}:{fix.location.line}"
        why = "it conflicts with the other fixes" if fix.safe else "it may change what else the script does"
        files, _ = rewrite([fix], held)
        changes = "".join(difference(file, shown_path(file.file, found.examination.root)) for file in files)
        streams.say(f"{where}: {fix.code}: not made, since {why}: {fix.description}\n" + changes.replace("\r\n", "\n"))


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
