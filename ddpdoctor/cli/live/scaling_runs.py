"""Runs a job on several numbers of ranks, one after the other, each observed as by ``profile``."""

from __future__ import annotations

import signal

from ddpdoctor.cli.live import signals
from ddpdoctor.cli.live.observed_job import ObservedJob
from ddpdoctor.launch.environment import ObservedCommand
from ddpdoctor.report import streams
from ddpdoctor.what_if.links import ScalingRun

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
