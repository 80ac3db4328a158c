"""Watches a job in plain lines until it ends, or until the user goes; passes signals on to a job that we started."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ddpdoctor.errors import DdpDoctorError, ExitCode
from ddpdoctor.launch.job import LaunchedJob
from ddpdoctor.monitor.snapshot import SnapshotSource
from ddpdoctor.report import streams
from ddpdoctor.report.run_lines import RunLines

LOOK_EVERY_S = 0.25
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SENT_BY_THE_KERNEL = 0
"""``si_code`` is above this when no process sent a signal: the terminal did, and to all of its foreground processes."""


def launch_and_watch(launch: Callable[[], LaunchedJob], directory: Path) -> int:
    """Start a job and watch it until it ends; its exit code.

    A fault of ours ends the watching, never the job.
    """
    from ddpdoctor.observe import live_source

    # A signal must find either no job or one that it can be passed on to.
    with _waiting_for_signals():
        job = launch()
        source: SnapshotSource | None = None
        try:
            source = live_source(directory, job)
        except Exception as error:
            _say_fault(error)
        lines = RunLines()
        while True:
            code = job.exit_code()
            if source is not None:
                try:
                    streams.say_lines(lines.news(source.snapshot(), ended=code is not None))
                except Exception as error:
                    _say_fault(error)
                    source = None
            if code is not None:
                break
            _pass_on(job, LOOK_EVERY_S)
        job.end_leftovers()
        if source is not None:
            source.close()
    return code


def attach(run_directory: str | None) -> int:
    """Watch a job that runs, which goes on when we leave."""
    from ddpdoctor.launch.attachable import find_run
    from ddpdoctor.observe import live_source

    directory, others = find_run(run_directory)
    source = live_source(directory)
    streams.say(f"ddpdoctor: attached to {directory}")
    if others:
        streams.say("ddpdoctor: other live runs, for `--run-dir`: " + ", ".join(map(str, others)))
    lines = RunLines()
    with _waiting_for_signals():
        try:
            while True:
                snapshot = source.snapshot()
                streams.say_lines(lines.news(snapshot, ended=snapshot.state == "ended"))
                if snapshot.state == "ended":
                    return ExitCode.CLEAN
                if signal.sigtimedwait(_PASSED_ON, LOOK_EVERY_S) is not None:
                    streams.say("ddpdoctor: detached; the job goes on")
                    return ExitCode.INTERRUPTED
        finally:
            source.close()


def _pass_on(job: LaunchedJob, seconds: float) -> None:
    """Sleep until the job ends, a signal comes, or the time is over; pass the signal on."""
    received = signal.sigtimedwait((*_PASSED_ON, signal.SIGCHLD), seconds)
    if received is None or received.si_signo == signal.SIGCHLD:
        return
    if received.si_signo == signal.SIGINT and received.si_code > _SENT_BY_THE_KERNEL:
        job.was_told_by_the_terminal()
    else:
        job.forward(received.si_signo)


@contextmanager
def _waiting_for_signals() -> Iterator[None]:
    """Keep signals until they are waited for, so that none interrupts a look."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_PASSED_ON, signal.SIGCHLD))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _say_fault(error: Exception) -> None:
    said = error.message if isinstance(error, DdpDoctorError) else f"{type(error).__name__}: {error}"
    streams.say(f"ddpdoctor: the observation failed ({said}); the job goes on")

