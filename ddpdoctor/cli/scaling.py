"""``ddpdoctor scaling``: what more ranks bring, by running the job on several numbers of them."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ddpdoctor.cli.options.command import MOST_PROCESSES, SCRIPT, SCRIPT_ARGUMENTS, JobCommand, help_option
from ddpdoctor.cli.output import RunOutput, of_page, run_output_options
from ddpdoctor.errors import DdpDoctorError, ExitCode, UsageError
from ddpdoctor.report import streams


@click.command(cls=JobCommand, add_help_option=False)
@click.option(
    "--ranks", "numbers", metavar="N,N,...", help="Numbers of ranks.  [default: 1, 2, 4 … up to the GPUs, or 1,2]"
)
@click.option(
    "--steps",
    type=click.IntRange(min=30),
    metavar="N",
    help="End each run with SIGTERM after this many steps on all ranks; by default, runs go to their end.",
)
@click.option("--python", metavar="PATH", help="Python interpreter of the ranks; by default, one that has torch.")
@click.option("--no-links", is_flag=True, help="Do not measure the links.")
@run_output_options("svg", help="Write the plot: svg=FILE.")
@help_option()
@click.pass_context
def scaling(
    ctx: click.Context,
    numbers: str | None,
    steps: int | None,
    python: str | None,
    no_links: bool,
    wanted: RunOutput,
) -> None:
    """Run SCRIPT on several numbers of ranks on this machine, and report how it scales.

    The runs follow one another, each observed as by `ddpdoctor profile` and kept; their output goes to a file. Then the
    links are measured: a barrier, and all-reduces by size. Exits with 3 if the speed of a run is unknown.
    """
    from ddpdoctor.cli.live.scaling_runs import run_on
    from ddpdoctor.launch.environment import script_command
    from ddpdoctor.launch.interpreter import find_interpreter
    from ddpdoctor.launch.request import visible_gpus
    from ddpdoctor.profile.link_sweeps import sweep
    from ddpdoctor.report.output_file import OutputFile
    from ddpdoctor.report.run import scaling_text
    from ddpdoctor.what_if.links import LinkSweep, MeasuredScaling, points_of

    script: str | None = ctx.meta.get(SCRIPT)
    if script is None:
        raise UsageError("give a script", "`ddpdoctor scaling train.py --ranks 1,2,4` starts it by torch's launcher.")
    if not Path(script).is_file():
        raise UsageError(f"{script} is a directory" if Path(script).is_dir() else f"{script} does not exist")
    ranks_wanted = _numbers(numbers, visible_gpus(os.environ))
    wanted.refuse_what_cannot_be_written(script)
    interpreter = find_interpreter(python).path
    runs = []
    for ranks in ranks_wanted:
        streams.say(f"ddpdoctor: {script} on {ranks} {'rank' if ranks == 1 else 'ranks'}")
        command = script_command(
            interpreter, script, ctx.meta[SCRIPT_ARGUMENTS], ranks, module=False, spawns_ranks=False
        )
        runs.append(run_on(command, ranks, steps))
    sweeps: list[LinkSweep] = []
    notes: list[str] = []
    for ranks in () if no_links else [number for number in ranks_wanted if number > 1]:
        streams.say(f"ddpdoctor: the links of {ranks} ranks")
        try:
            sweeps.append(sweep(interpreter, ranks))
        except DdpDoctorError as error:
            notes.append(error.message)
    cores = len(os.sched_getaffinity(0))
    if not visible_gpus(os.environ) and max(ranks_wanted) > cores:
        notes.append(f"{max(ranks_wanted)} ranks share {cores} cores: the figures include what they lose to each other")
    result = MeasuredScaling(name=Path(script).name, points=points_of(runs), sweeps=tuple(sweeps), notes=tuple(notes))
    if wanted.exported is not None:
        OutputFile(wanted.exported, force=wanted.force).write_text(scaling_text.as_svg(result), "html")

    def render(kind: str, width: int, colour: bool) -> str:
        if kind == "json":
            return scaling_text.as_json(result)
        return of_page(kind, scaling_text.page(result), width, colour=colour)

    wanted.write_rendered(render)
    ctx.exit(ExitCode.INCONCLUSIVE if any(run.failed for run in runs) else ExitCode.CLEAN)


def _numbers(words: str | None, gpus: int) -> list[int]:
    """Return the numbers of ranks, ascending; raises UsageError for what is none."""
    if words is None:
        most = gpus or 2
        return sorted({1, most, *(1 << shift for shift in range(most.bit_length()))})
    example = "Write `--ranks 1,2,4`."
    try:
        found = sorted({int(word) for word in words.split(",")})
    except ValueError:
        raise UsageError(f"--ranks {words}: expected whole numbers separated by commas", example) from None
    if found[0] < 1 or found[-1] > MOST_PROCESSES:
        raise UsageError(f"--ranks {words}: expected numbers from 1 to {MOST_PROCESSES:,}", example)
    if gpus and found[-1] > gpus:
        raise UsageError(
            f"--ranks {words}: this machine has {gpus} GPUs", "With more ranks than GPUs, ranks would share a GPU."
        )
    return found
