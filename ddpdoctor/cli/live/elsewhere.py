"""Looks at a run that a monitor elsewhere shows, on the screen or in plain lines; touches neither it nor its record."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.cli.live import screen, signals
from ddpdoctor.errors import ExitCode, RecordError
from ddpdoctor.files.untrusted import lines_by
from ddpdoctor.report import streams
from ddpdoctor.report.run.run_lines import RunLines

if TYPE_CHECKING:
    from ddpdoctor.cli.output import RunOutput
    from ddpdoctor.monitor.nodes.attached import AttachedRun

LOOK_EVERY_S = 0.5
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
        if signals.wait(LOOK_EVERY_S) is not None:
            streams.say("ddpdoctor: detached; the job was not touched")
            return ExitCode.CLEAN
