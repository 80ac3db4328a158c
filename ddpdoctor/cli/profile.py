"""``ddpdoctor profile``: run a job under observation, or watch one that runs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from ddpdoctor.cli.options.command import MOST_PROCESSES, SCRIPT_ARGUMENTS, help_option
from ddpdoctor.cli.options.job import SCRIPT, JobCommand
from ddpdoctor.cli.options.run_output import RunFormat, RunOutput, run_output_options
from ddpdoctor.errors import UsageError
from ddpdoctor.launch.environment import observed
from ddpdoctor.launch.profile_command import RANKS_WITHOUT_GPU, ObservedCommand, launch_command
from ddpdoctor.record import layout
from ddpdoctor.report import streams

if TYPE_CHECKING:
    from ddpdoctor.launch.job import LaunchedJob


@click.command(cls=JobCommand, add_help_option=False)
@click.option("-m", "--module", metavar="NAME", help="Start what `python -m NAME` runs, instead of a script.")
@click.option(
    "--nproc",
    type=click.IntRange(min=1, max=MOST_PROCESSES),
    metavar="N",
    help="Ranks to start.  [default: one a GPU, or 2]",
)
@click.option("--python", metavar="PATH", help="Interpreter of the ranks; by default one that has torch is looked for.")
@click.option(
    "--run-dir",
    metavar="DIR",
    envvar=layout.RUN_VARIABLE,
    help="Directory for the record, instead of a new one; without a job: the run to attach to.",
)
@click.option("--no-tui", is_flag=True, help="Plain lines on stderr instead of the screen.")
@click.option(
    "--one-rank",
    metavar="RUN",
    help="A recorded run of the same training on one rank, to measure what more ranks bring: its directory or name.",
)
@click.option("--demo", is_flag=True, help="Show the screen of a job of 8 ranks that never ran, and exit.")
@click.option("--replay", metavar="RUN", help="Show a recorded run on the screen again: its directory or name.")
@click.option(
    "--env",
    "print_environment",
    is_flag=True,
    help="Print the two variables that let a job be watched that another launcher starts, and exit.",
)
@click.option(
    "--head",
    "head",
    metavar="HOST:PORT",
    help="Where the node of rank 0 listens, and the others send what they see; by default that is found out.",
)
@click.option(
    "--attach",
    "attached",
    metavar="HOST:PORT",
    help="Show the screen of another monitor here, read only: where it listens, or a run of yours, or its key file.",
)
@click.option(
    "--key", "key_file", metavar="FILE", help="For --attach: a copy of `attach.key` of the run's directory there."
)
@click.option(
    "--metrics",
    metavar="[HOST:]PORT",
    help="Serve the figures to Prometheus; on this machine alone where no address is named.",
)
@click.option(
    "--on-hang",
    metavar="COMMAND",
    help="Run this once when it is proved that the job hangs, with the finding as JSON on its stdin.",
)
@run_output_options
@help_option()
@click.pass_context
def profile(
    ctx: click.Context,
    module: str | None,
    nproc: int | None,
    python: str | None,
    run_dir: str | None,
    no_tui: bool,
    one_rank: str | None,
    demo: bool,
    replay: str | None,
    print_environment: bool,
    head: str | None,
    attached: str | None,
    key_file: str | None,
    metrics: str | None,
    on_hang: str | None,
    output_format: RunFormat,
    output: str | None,
    reports: tuple[str, ...],
    export: str | None,
    force: bool,
    no_color: bool,
) -> None:
    """Run a job under observation, or attach to one that runs.

    SCRIPT is started by torchrun on all GPUs of this machine, or on 2 CPU ranks; behind `--` stands any command that
    launches a job, as in `ddpdoctor profile -- torchrun --nproc-per-node 8 train.py`. Without either, the newest
    watched job of this user is attached to; it goes on when ddpdoctor ends.

    On a terminal a screen shows the run; what the job prints goes to a file then, and it has nothing to read. Without
    one, or with --no-tui, the job keeps its stdin, stdout and stderr; what ddpdoctor says goes to stderr, the report at
    the end included. For JSON without a file the job's stdout goes to stderr, so that stdout holds the JSON alone. The
    exit code is the job's.

    Where the job has several nodes, start its part on each of them so: the node of rank 0 then tells of all ranks, and
    the others forward what they see to it. `ddpdoctor profile --attach` shows the same screen on a further machine, and
    touches nothing; a job on one node can be seen so, too, where --head names a port.

    What more ranks bring is measured against a run on one: `ddpdoctor profile --nproc 1 train.py` says at its end where
    it is recorded, and `ddpdoctor profile --one-rank RUN train.py` compares with it.
    """
    from ddpdoctor.cli.live import screen, watching
    from ddpdoctor.cli.live.outlets import Outlets
    from ddpdoctor.monitor.nodes.meeting import host_and_port

    if demo or replay is not None or print_environment or attached is not None:
        name = "--demo" if demo else "--replay" if replay is not None else "--env" if print_environment else "--attach"
        if ctx.meta.get(SCRIPT) or ctx.meta[SCRIPT_ARGUMENTS]:
            raise UsageError(f"{name} starts no job", "Leave the script or the command out.")
        if one_rank is not None:
            raise UsageError(f"{name} measures no job", "Leave --one-rank out.")
        others = {"-m": module, "--nproc": nproc, "--metrics": metrics, "--on-hang": on_hang, "--head": head}
        for option, value in others.items():
            if value is not None:
                raise UsageError(f"{name} watches no job of its own", f"Leave {option} out.")
    if key_file is not None and attached is None:
        raise UsageError("--key is for --attach", "Name what to look at with `--attach HOST:PORT`.")
    if demo or replay is not None:
        screen.show_demo() if replay is None else screen.show_replay(replay)
        ctx.exit()
    if print_environment:
        streams.write_result(_exports(run_dir))
        ctx.exit()
    if nproc is not None and ctx.meta[SCRIPT_ARGUMENTS] and ctx.meta.get(SCRIPT) is None and module is None:
        raise UsageError(
            "--nproc does not reach the command behind `--`", "Give the number of ranks to the launcher there."
        )
    wanted = RunOutput(
        format=output_format, file=output, reports=reports, export=export, force=force, no_color=no_color
    )
    wanted.refuse_what_cannot_be_written(ctx.meta.get(SCRIPT))
    command = _command(ctx, module, nproc, python)
    on_screen = not no_tui and streams.screen_possible()
    if attached is not None:
        from ddpdoctor.cli.live.elsewhere import look_on

        if run_dir is not None and ctx.get_parameter_source("run_dir") is ParameterSource.COMMANDLINE:
            raise UsageError("--attach writes no record", "Leave --run-dir out.")
        if export is not None:
            raise UsageError("--attach has no record to make a trace of", "Leave --export out.")
        ctx.exit(look_on(attached, key_file, wanted, on_screen=on_screen))
    alone = _one_rank_samples_per_s(one_rank)
    head_at = None if head is None else host_and_port(head, "--head")
    outlets = Outlets(metrics, on_hang)
    if command is None:
        ctx.exit(
            watching.attach(
                run_dir, wanted, on_screen=on_screen, one_rank_samples_per_s=alone, outlets=outlets, head_at=head_at
            )
        )
    from ddpdoctor.cli.live.observed_job import ObservedJob

    job = ObservedJob(command, run_dir, alone)
    to_stderr = wanted.format != "text" and wanted.file is None

    def launch() -> LaunchedJob:
        return job.launch(apart=on_screen, output=streams.STDERR if to_stderr else None)

    ctx.exit(watching.launch_and_watch(launch, job.directory, wanted, outlets, head_at))


def _exports(run_dir: str | None) -> str:
    """The variables as a shell takes them: ``eval "$(ddpdoctor profile --env)"``."""
    from ddpdoctor.launch.runs.kept_runs import unmade_run_directory

    variables = observed(unmade_run_directory(run_dir), os.environ)
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def _command(ctx: click.Context, module: str | None, nproc: int | None, python: str | None) -> ObservedCommand | None:
    """What is to be started; None when nothing is named."""
    from ddpdoctor.launch.command.command_line import looks_like_launch

    script: str | None = ctx.meta.get(SCRIPT)
    words: tuple[str, ...] = ctx.meta[SCRIPT_ARGUMENTS]
    if script is not None and module is not None:
        raise UsageError(f"either {script} or --module {module}, not both")
    named = script or module
    if named is None:
        return launch_command(words) if words else None
    if looks_like_launch((named,)) or looks_like_launch((named, *words)):
        raise UsageError(f"{named} is a launcher", f"Write `ddpdoctor profile -- {' '.join((named, *words))}`.")
    if script is not None and not Path(script).is_file():
        raise UsageError(f"{script} is a directory" if Path(script).is_dir() else f"{script} does not exist")
    from ddpdoctor.launch.devices import visible_gpus
    from ddpdoctor.launch.interpreter import find_interpreter
    from ddpdoctor.launch.profile_command import script_command

    return script_command(
        find_interpreter(python).path,
        named,
        words,
        nproc or visible_gpus(os.environ) or RANKS_WITHOUT_GPU,
        module=module is not None,
        spawns_ranks=script is not None and _spawns_ranks(Path(script), words),
    )


def _spawns_ranks(script: Path, arguments: Sequence[str]) -> bool:
    """Tell whether a script starts its ranks itself; one that cannot be read is left to Python to complain of."""
    from ddpdoctor.source.queries.start_up import starts_own_ranks
    from ddpdoctor.source.script.script import read_script

    try:
        return starts_own_ranks(read_script(script), arguments, by_python=False)
    except UsageError:
        return False


def _one_rank_samples_per_s(run: str | None) -> float | None:
    """The throughput to compare with, if a run was named."""
    if run is None:
        return None
    from ddpdoctor.profile.recorded_run import one_rank_samples_per_s

    return one_rank_samples_per_s(run)
