"""Who is told of a watched job besides its user: Prometheus, and a command for hangs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.cli.live import signals
from ddpdoctor.report import streams

if TYPE_CHECKING:
    from ddpdoctor.cli.live.hang_command import HangCommand
    from ddpdoctor.launch.job import LaunchedJob
    from ddpdoctor.metrics import MetricsServer
    from ddpdoctor.profile.watch import RunSource

REPORT_WAITS_S = 3.0
"""So long the report waits for a command that runs, to say how it ended; a message is sent within a second or two."""


class Outlets:
    """What ``--metrics`` and ``--on-hang`` ask for."""

    def __init__(self, metrics: str | None = None, on_hang: str | None = None) -> None:
        """Listen on the port, and see that the command is there; raises UsageError where that is not so."""
        self._server: MetricsServer | None = None
        self._words: tuple[str, ...] = ()
        self._command: HangCommand | None = None
        if on_hang is not None:
            from ddpdoctor.cli.live.hang_command import read_command

            self._words = read_command(on_hang)
        if metrics is not None:
            from ddpdoctor.metrics import MetricsServer, read_address

            self._server = MetricsServer(read_address(metrics))
            streams.say(f"ddpdoctor: serving metrics at http://{self._server.address}/metrics")

    def connect(self, source: RunSource, directory: Path, job: LaunchedJob | None = None) -> None:
        """Have each new snapshot passed on; ``job`` is the one that was started here."""
        if self._server is not None:
            source.tell(self._server)
        if self._words:
            from ddpdoctor.cli.live.hang_command import HangCommand

            self._command = HangCommand(self._words, directory, job)
            source.tell(self._command)

    def close(self, *, ended: bool) -> None:
        """Listen no more, start nothing any more; ``ended``: the job that was started here has.

        Waits for a command that runs, for a few seconds or until a signal asks to end.
        """
        if self._server is not None:
            self._server.close()
        if self._command is not None:
            self._command.close(ended=ended)
            until_s = time.monotonic() + REPORT_WAITS_S
            while self._command.runs and time.monotonic() < until_s:
                if signals.wait(0.1) is not None:
                    self._command.kill()

    def finish(self) -> None:
        """Wait until a command that still runs has ended, or its time is over; a signal that asks to end kills it."""
        command = self._command
        if command is None or not command.runs:
            return
        streams.say(
            f"ddpdoctor: waiting for `{command.name}` of --on-hang, at most {command.left_s:.0f} s; Ctrl-C kills it"
        )
        while command.runs:
            if signals.wait(0.1) is not None:
                command.kill()
        streams.say(f"ddpdoctor: {command.note}")
