"""Who is told of a watched job besides its user: Prometheus, and a command for hangs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.report import streams

if TYPE_CHECKING:
    from ddpdoctor.cli.live.hang_command import HangCommand
    from ddpdoctor.metrics.server import MetricsServer
    from ddpdoctor.profile.watch import RunSource


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
            from ddpdoctor.metrics.server import MetricsServer, read_address

            self._server = MetricsServer(read_address(metrics))
            streams.say(f"ddpdoctor: metrics are served at http://{self._server.address}/metrics")

    def connect(self, source: RunSource, directory: Path) -> None:
        """Have each new snapshot passed on."""
        if self._server is not None:
            source.tell(self._server)
        if self._words:
            from ddpdoctor.cli.live.hang_command import HangCommand

            self._command = HangCommand(self._words, directory)
            source.tell(self._command)

    def close(self, *, ended: bool) -> None:
        """Listen no more; waits for a command that runs, within its bound. ``ended``: the job has."""
        if self._server is not None:
            self._server.close()
        if self._command is not None:
            self._command.close(ended=ended)
