"""``ddpdoctor profile``: run a job under observation, or watch one that runs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from ddpdoctor.cli.options import MOST_PROCESSES, SCRIPT, SCRIPT_ARGUMENTS, JobCommand, help_option
from ddpdoctor.cli.output import TRACE, RunOutput
from ddpdoctor.errors import UsageError
from ddpdoctor.launch.environment import RANKS_WITHOUT_GPU, ObservedCommand, launch_command, observed
from ddpdoctor.record import layout
from ddpdoctor.report import streams

if TYPE_CHECKING:
    from ddpdoctor.launch.job import LaunchedJob


@click.command(cls=JobCommand, add_help_option=False)
@click.option("-m", "--module", metavar="NAME", help="Run a module as `python -m NAME` does, instead of a script.")
@click.option(
    "--nproc",
    type=click.IntRange(min=1, max=MOST_PROCESSES),
    metavar="N",
    help="Ranks to start.  [default: one per GPU, or 2]",
)
@click.option("--python", metavar="PATH", help="Python interpreter of the ranks; by default, one that has torch.")
@click.option(
    "--run-dir",
    metavar="DIR",
    envvar=layout.RUN_VARIABLE,
    help="Directory for the record; without a job: the run to attach to.",
)
@click.option("--no-tui", is_flag=True, help="Plain lines on stderr instead of the screen.")
@click.option(
    "--one-rank",
    metavar="RUN",
    help="A recorded run of the same training on one rank, to measure scaling against: its directory or name.",
)
@click.option("--demo", is_flag=True, help="Show the screen of a simulated job of 8 ranks, and exit.")
@click.option("--replay", metavar="RUN", help="Replay a recorded run on the screen: its directory or name.")
@click.option(
    "--env",
    "print_environment",
    is_flag=True,
    help="Print the two variables that let ddpdoctor watch a job started by another launcher, and exit.",
)
@click.option(
    "--head",
    "head",
    metavar="HOST:PORT",
    help="Where the node of rank 0 listens for the other nodes; found automatically by default.",
)
@click.option(
    "--attach",
    "attached",
    metavar="HOST:PORT",
    help="Show the screen of another monitor, read-only: its address, one of your runs, or its key file.",
)
@click.option(
    "--key",
    "key_file",
    metavar="FILE",
    help="With --attach: a copy of `attach.key` from the run's directory on that machine.",
)
@click.option(
    "--metrics",
    metavar="[HOST:]PORT",
    help="Serve metrics to Prometheus; only on this machine if no address is given.",
)
@click.option(
    "--on-hang",
    metavar="COMMAND",
    help="Run this command once when the job is proved to hang, with the finding as JSON on stdin.",
)
@TRACE
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
    wanted: RunOutput,
) -> None:
    """Run a job under observation, or attach to a running one.

    SCRIPT is started by torchrun on all GPUs of this machine, or on 2 CPU ranks; or give any command that launches a
    job after `--`, as in `ddpdoctor profile -- torchrun --nproc-per-node 8 train.py`. Without either, ddpdoctor
    attaches to your newest watched job, which continues when ddpdoctor ends.

    On a terminal a screen shows the run; the job's output then goes to a file, and its stdin is empty. Without
    one, or with --no-tui, the job keeps its stdin, stdout and stderr; ddpdoctor writes to stderr, including the final
    report. For JSON without -o the job's stdout goes to stderr, so that stdout holds only the JSON. The exit code is
    the job's.

    For a job on several nodes, start its part on each node this way: the node of rank 0 then reports all ranks, and the
    others forward their data to it. `ddpdoctor profile --attach` shows the same screen on another machine, read-only;
    this works for a job on one node, too, if --head gives a port.

    Scaling is measured against a run on one rank: `ddpdoctor profile --nproc 1 train.py` prints at its end where it is
    recorded, and `ddpdoctor profile --one-rank RUN train.py` compares with it.
    """
    from ddpdoctor.cli.live import screen, watching
    from ddpdoctor.cli.live.hang_command import Outlets
    from ddpdoctor.monitor.nodes.meeting import host_and_port

    if demo or replay is not None or print_environment or attached is not None:
        name = "--demo" if demo else "--replay" if replay is not None else "--env" if print_environment else "--attach"
        if ctx.meta.get(SCRIPT) or ctx.meta[SCRIPT_ARGUMENTS]:
            raise UsageError(f"{name} does not start a job", "Omit the script or the command.")
        if one_rank is not None:
            raise UsageError(f"{name} does not measure a job", "Omit --one-rank.")
        others = {"-m": module, "--nproc": nproc, "--metrics": metrics, "--on-hang": on_hang, "--head": head}
        for option, value in others.items():
            if value is not None:
                raise UsageError(f"{name} does not watch a job itself", f"Omit {option}.")
    if key_file is not None and attached is None:
        raise UsageError("--key requires --attach", "Give the monitor with `--attach HOST:PORT`.")
    if demo or replay is not None:
        screen.show_demo() if replay is None else screen.show_replay(replay)
        ctx.exit()
    if print_environment:
        streams.write_result(_exports(run_dir))
        ctx.exit()
    if nproc is not None and ctx.meta[SCRIPT_ARGUMENTS] and ctx.meta.get(SCRIPT) is None and module is None:
        raise UsageError(
            "--nproc does not apply to the command after `--`",
            "Pass the number of ranks to the launcher in the command.",
        )
    wanted.refuse_what_cannot_be_written(ctx.meta.get(SCRIPT))
    command = _command(ctx, module, nproc, python)
    on_screen = not no_tui and streams.screen_possible()
    if attached is not None:
        if run_dir is not None and ctx.get_parameter_source("run_dir") is ParameterSource.COMMANDLINE:
            raise UsageError("--attach writes no record", "Omit --run-dir.")
        if wanted.export is not None:
            raise UsageError("--attach has no record to export", "Omit --export.")
        ctx.exit(watching.look_on(attached, key_file, wanted, on_screen=on_screen))
    alone = None
    if one_rank is not None:
        from ddpdoctor.profile.recorded_run import one_rank_samples_per_s

        alone = one_rank_samples_per_s(one_rank)
    head_at = None if head is None else host_and_port(head, "--head")
    outlets = Outlets(metrics, on_hang)
    if command is None:
        ctx.exit(
            watching.attach(
                run_dir, wanted, on_screen=on_screen, one_rank_samples_per_s=alone, outlets=outlets, head_at=head_at
            )
        )
    from ddpdoctor.cli.live.observed_job import ObservedJob

    job = ObservedJob(command, run_dir, alone, even_unobserved=True)
    if job.why_unobserved:
        streams.say(f"ddpdoctor: {job.why_unobserved}; the job runs unobserved, and nothing is reported")
        on_screen = False
    to_stderr = wanted.format != "text" and wanted.file is None

    def launch() -> LaunchedJob:
        return job.launch(apart=on_screen, output=streams.STDERR if to_stderr else None)

    ctx.exit(watching.launch_and_watch(launch, job.directory, wanted, outlets, head_at))


def _exports(run_dir: str | None) -> str:
    """Return the variables as a shell takes them: ``eval "$(ddpdoctor profile --env)"``."""
    from ddpdoctor.launch.kept_runs import unmade_run_directory

    variables = observed(unmade_run_directory(run_dir), os.environ)
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def _command(ctx: click.Context, module: str | None, nproc: int | None, python: str | None) -> ObservedCommand | None:
    """Return what is to be started; None when nothing is named."""
    from ddpdoctor.launch.command_line import looks_like_launch

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
    from ddpdoctor.launch.environment import script_command
    from ddpdoctor.launch.interpreter import find_interpreter
    from ddpdoctor.launch.request import visible_gpus

    return script_command(
        find_interpreter(python).path,
        named,
        words,
        nproc or visible_gpus(os.environ) or RANKS_WITHOUT_GPU,
        module=module is not None,
        spawns_ranks=script is not None and _spawns_ranks(Path(script), words),
    )


def _spawns_ranks(script: Path, arguments: Sequence[str]) -> bool:
    """Return whether a script starts its ranks itself; one that cannot be read is left to Python to complain of."""
    from ddpdoctor.source.queries.job_kind import starts_own_ranks
    from ddpdoctor.source.script.script import read_script

    try:
        return starts_own_ranks(read_script(script), arguments, by_python=False)
    except UsageError:
        return False
