"""``ddpdoctor scaling``: what more ranks bring, by running the job on several numbers of them."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import click
import msgspec

from ddpdoctor.cli.live import signals
from ddpdoctor.cli.live.observed_job import ObservedJob
from ddpdoctor.cli.options import MOST_PROCESSES, SCRIPT, SCRIPT_ARGUMENTS, JobCommand, help_option
from ddpdoctor.cli.output import RunOutput, run_output_options
from ddpdoctor.errors import DdpDoctorError, ExitCode, UsageError
from ddpdoctor.launch.environment import ObservedCommand, script_command
from ddpdoctor.report import streams
from ddpdoctor.what_if.links import AllReduce, LinkSweep, ScalingRun


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
    from ddpdoctor.launch.interpreter import find_interpreter
    from ddpdoctor.launch.request import visible_gpus
    from ddpdoctor.report.formats.json import of_result
    from ddpdoctor.report.output_file import OutputFile
    from ddpdoctor.report.run import scaling_text
    from ddpdoctor.what_if.links import MeasuredScaling, points_of

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
    wanted.write_page(lambda: scaling_text.page(result), lambda: of_result(result))
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


LOOK_EVERY_S = 0.5
FEWEST_STEPS = 20


def run_on(command: ObservedCommand, ranks: int, most_steps: int | None) -> ScalingRun:
    """Run the job to its end, or until every rank has made ``most_steps``; raises KeyboardInterrupt when told to end.

    What it prints goes to a file of its run directory.
    """
    from ddpdoctor.monitor.processes.liveness import launcher_output, tail
    from ddpdoctor.profile.watch import live_source

    observed = ObservedJob(command)
    told = False
    with signals.kept():
        job = observed.launch(apart=True)
        with signals.Relay(job) as relay, relay.quietly():
            source = live_source(observed.directory, job)
            try:
                while (code := job.exit_code()) is None:
                    steps = source.snapshot().steps or 0
                    if most_steps is not None and steps >= most_steps and not job.told_to_end:
                        job.forward(signal.SIGTERM)
                    if (received := signals.wait(LOOK_EVERY_S)) is not None:
                        told = True
                        signals.tell_to_end(job, received)
                signals.end_leftovers(job)
                snapshot, record = source.final_snapshot(), source.record()
            finally:
                source.close()
    if told:
        raise KeyboardInterrupt
    measured = min((rank.measured_steps for rank in snapshot.ranks), default=0)
    failed = ""
    # An abort at the very end, as torch with gloo makes sometimes, takes nothing from the figures.
    finished = bool(record.ranks) and all(rank.main_finished for rank in record.ranks)
    if code and not job.told_to_end and not finished:
        failed = f"the job failed with exit code {code}"
        streams.say(tail(launcher_output(observed.directory)))
    elif measured < FEWEST_STEPS:
        failed = f"{measured} steps were measured after the warm-up, and at least {FEWEST_STEPS} are needed"
    elif (snapshot.world_size or 1) != ranks:
        failed = f"the script started {snapshot.world_size} of the {ranks} requested ranks"
    phases = snapshot.phases
    return ScalingRun(
        ranks=ranks,
        run_directory=str(observed.directory),
        failed=failed,
        steps=measured,
        step_ns=None if phases is None else phases.step_ns,
        samples_per_s=snapshot.samples_per_s,
        exposed_share=snapshot.exposed_share,
    )


# The sweep of the links on so many ranks of this machine.

SWEPT_IN_S = 180.0
LINK_SWEEP = Path(__file__).parents[1] / "probe" / "link_sweep.py"


def sweep(python: str, ranks: int) -> LinkSweep:
    """Measure a barrier and all-reduces by size; raises DdpDoctorError, with the reason, where that fails."""
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-links-") as directory:
        told = Path(directory) / "told.json"
        command = script_command(python, str(LINK_SWEEP), (str(told),), ranks, module=False, spawns_ranks=False)
        process = subprocess.Popen(
            command.words,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            _, said = process.communicate(timeout=SWEPT_IN_S)
        except subprocess.TimeoutExpired:
            raise DdpDoctorError(f"the links of {ranks} ranks were not measured within {SWEPT_IN_S:.0f} s") from None
        finally:
            _end(process)
        if not told.exists():
            last = (said.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
            raise DdpDoctorError(f"the links of {ranks} ranks could not be measured: {last}")
        return _read(msgspec.json.decode(told.read_bytes()))


def _read(told: dict[str, Any]) -> LinkSweep:
    ranks = int(told["ranks"])
    return LinkSweep(
        ranks=ranks,
        backend=str(told["backend"]),
        barrier_s=float(told["barrier_s"]),
        all_reduce=tuple(
            AllReduce(
                bytes=int(entry["bytes"]),
                seconds=float(entry["seconds"]),
                bus_bytes_per_s=2 * (ranks - 1) / ranks * int(entry["bytes"]) / float(entry["seconds"]),
            )
            for entry in told["all_reduce"]
        ),
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the launcher and its ranks, if they still run; each rank has a session of its own."""
    import psutil

    if process.poll() is not None:
        return
    try:
        started = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        started = []
    process.kill()
    for child in started:
        try:
            child.kill()
        except psutil.Error:
            continue
    process.wait()
