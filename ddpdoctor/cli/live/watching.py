"""Watches a job, on the screen or in plain lines, until it ends or the user goes; passes on signals to our own."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.cli.live import screen, signals
from ddpdoctor.cli.live.observed_job import NOWHERE
from ddpdoctor.errors import DdpDoctorError, ExitCode, RecordError
from ddpdoctor.files.untrusted import lines_by
from ddpdoctor.report import streams
from ddpdoctor.report.run.run_lines import RunLines

if TYPE_CHECKING:
    from ddpdoctor.cli.live.hang_command import Outlets
    from ddpdoctor.cli.output import RunOutput
    from ddpdoctor.launch.job import LaunchedJob
    from ddpdoctor.monitor.nodes.attached import AttachedRun
    from ddpdoctor.profile.watch import RunSource

LOOK_EVERY_S = 0.25


def launch_and_watch(
    launch: Callable[[], LaunchedJob],
    directory: Path,
    wanted: RunOutput,
    outlets: Outlets,
    head_at: tuple[str, int] | None,
) -> int:
    """Start a job, watch it until it ends, and report; its exit code.

    ``head_at`` is where the monitor listens that reports all nodes, where the user says it.

    A fault of ours ends the watching, never the job; in ``NOWHERE`` nothing is watched.
    """
    # A signal must find either no job or one that it can be passed on to.
    with signals.kept():
        job = launch()
        with signals.Relay(job) as relay:
            watcher = _Watcher(directory, job, outlets, head_at)
            if job.is_apart:
                watcher.show_screen(relay)
            while (code := job.exit_code()) is None:
                watcher.look()
                if (received := signals.wait(LOOK_EVERY_S)) is not None:
                    signals.tell_to_end(job, received)
        if job.is_apart:
            _say_output(directory, failed=code != 0 and not job.told_to_end, whole=job.output_is_whole)
        watcher.report(wanted)
        signals.end_leftovers(job)
    return code


def attach(
    run_directory: str | None,
    wanted: RunOutput,
    *,
    on_screen: bool,
    one_rank_samples_per_s: float | None,
    outlets: Outlets,
    head_at: tuple[str, int] | None,
) -> int:
    """Watch a job that runs, which continues when we leave."""
    from ddpdoctor.launch.kept_runs import find_run
    from ddpdoctor.profile.watch import live_source

    directory, others = find_run(run_directory)
    source = live_source(directory, one_rank_samples_per_s=one_rank_samples_per_s, head_at=head_at)
    outlets.connect(source, directory)
    streams.say(f"ddpdoctor: attached to {directory}; Ctrl-C detaches")
    if others:
        streams.say("ddpdoctor: other live runs, for `--run-dir`: " + ", ".join(map(str, others)))
    lines = RunLines(str(Path.cwd()))
    with signals.kept(), signals.Relay(None) as relay:
        try:
            if on_screen and _shown(source, relay) != "failed":
                streams.say("ddpdoctor: screen closed; the job was not touched")
            else:
                while (snapshot := source.snapshot()).state != "ended":
                    streams.say_lines(lines.news(snapshot))
                    if signals.wait(LOOK_EVERY_S) is not None:
                        streams.say("ddpdoctor: detached; the job continues")
                        break
            outlets.close(ended=False)  # Who ended a job that others started is not known.
            wanted.write(source.final_snapshot())
            wanted.write_trace(source.record())
        finally:
            source.close()
            outlets.finish()
    return ExitCode.CLEAN


class _Watcher:
    """Looks at a job that we started; a look that fails costs what it would have said."""

    def __init__(self, directory: Path, job: LaunchedJob, outlets: Outlets, head_at: tuple[str, int] | None) -> None:
        self._lines = RunLines(str(Path.cwd()))
        self._source: RunSource | None = None
        self._job = job
        self._outlets = outlets
        self._faults: set[str] = set()
        """What was said of looks that failed."""
        if directory == NOWHERE:
            return
        with self._guarded():
            from ddpdoctor.profile.watch import live_source

            self._source = live_source(directory, job, head_at=head_at)
            outlets.connect(self._source, directory, job)

    def show_screen(self, relay: signals.Relay) -> None:
        """Show the screen until the user leaves it, and do to the job what they asked for."""
        if self._source is None:
            return
        how = _shown(self._source, relay)
        if how in ("end_job", "terminated"):
            self._job.forward(signal.SIGTERM)
        elif self._job.exit_code() is None:
            streams.say("ddpdoctor: screen closed; the job continues, Ctrl-C ends it")

    def look(self) -> None:
        """Say what is new."""
        with self._guarded():
            if self._source is not None:
                streams.say_lines(self._lines.news(self._source.snapshot()))

    def report(self, wanted: RunOutput) -> None:
        """Write what is wanted of the run that has ended."""
        self._faults.clear()
        with self._guarded():
            self._outlets.close(ended=True)
        with self._guarded():
            if self._source is not None:
                wanted.write(self._source.final_snapshot(), beside_a_job=True)
                wanted.write_trace(self._source.record())
                self._source.close()
        with self._guarded():
            self._outlets.finish()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            said = error.message if isinstance(error, DdpDoctorError) else f"{type(error).__name__}: {error}"
            if said not in self._faults:
                self._faults.add(said)
                streams.say(f"ddpdoctor: observation failed ({said}); the job is unaffected")


def _shown(source: RunSource, relay: signals.Relay) -> str:
    """Show the screen; how the user left it, ``failed`` when it could not be shown."""
    try:
        with signals.taken(), relay.quietly():
            return screen.show(source)
    except KeyboardInterrupt:
        return "terminated"
    except Exception as error:
        streams.say(f"ddpdoctor: screen failed ({type(error).__name__}: {error}); continuing with plain lines")
        return "failed"


def _say_output(directory: Path, *, failed: bool, whole: bool) -> None:
    """Say where the job's output is, and the end of it when the job failed."""
    from ddpdoctor.monitor.processes.liveness import launcher_output, tail

    path = launcher_output(directory)
    if failed:
        streams.say(tail(path))
    streams.say(f"ddpdoctor: the job's output is in {path}{'' if whole else ', where some of it could not be written'}")


# A run that a monitor elsewhere shows, on the screen or in plain lines; neither it nor its record is touched.

LOOK_ON_EVERY_S = 0.5
GIVEN_UP_AFTER_S = 60.0
"""A monitor that takes the place of a dead one, or a link that was cut, is waited for so long."""


def look_on(where: str, key_file: str | None, wanted: RunOutput, *, on_screen: bool) -> int:
    """Look on until the job ends, its monitor leaves or the user does, and report what was shown last; the exit code.

    Inconclusive where the monitor was lost. Raises UsageError where there is nothing to be seen.
    """
    from ddpdoctor.monitor.nodes.attached import AttachedRun, find_key

    source = AttachedRun(find_key(where, key_file))  # Until there is something to be seen, Ctrl-C just ends this.
    try:
        with signals.kept(), signals.Relay(None) as relay, lines_by(source.line_of):
            streams.say(f"ddpdoctor: showing the run at {source.where}; Ctrl-C detaches")
            code = ExitCode.CLEAN
            if on_screen:
                with signals.taken(), relay.quietly():
                    screen.show(source)
                streams.say("ddpdoctor: screen closed; the job was not touched")
                if source.trouble:
                    streams.say(f"ddpdoctor: reporting what was last shown: {source.trouble}")
                    code = ExitCode.INCONCLUSIVE
            else:
                code = _in_lines(source)
            wanted.write(source.last_snapshot())
            return code
    finally:
        source.close()


def _in_lines(source: AttachedRun) -> ExitCode:
    """Say what is new until there is nothing more."""
    from ddpdoctor.monitor.nodes.attached import HeadLeft

    lines, lost_s = RunLines(str(Path.cwd())), 0.0
    while True:
        try:
            snapshot = source.snapshot()
            lost_s = 0.0
            streams.say_lines(lines.news(snapshot))
            if snapshot.state == "ended":
                return ExitCode.CLEAN
        except HeadLeft as error:
            streams.say(f"ddpdoctor: {error.message}")
            return ExitCode.INCONCLUSIVE
        except RecordError as error:
            if not lost_s:
                lost_s = time.monotonic()
                streams.say(f"ddpdoctor: {error.message}; retrying for {GIVEN_UP_AFTER_S:.0f} s")
            elif time.monotonic() - lost_s > GIVEN_UP_AFTER_S:
                streams.say(f"ddpdoctor: {error.message}; giving up")
                return ExitCode.INCONCLUSIVE
        if signals.wait(LOOK_ON_EVERY_S) is not None:
            streams.say("ddpdoctor: detached; the job was not touched")
            return ExitCode.CLEAN
