"""Runs a command of the user's once when the job hangs: a message to a chat, `scancel`.

It never holds up the job or the watching: it has a thread of its own, a bound in time, and its output goes to a file.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from ddpdoctor.cli.live import signals
from ddpdoctor.errors import UsageError
from ddpdoctor.finding import plain
from ddpdoctor.launch.job import unblock_signals
from ddpdoctor.launch.processes import without_signals
from ddpdoctor.report import streams
from ddpdoctor.report.formats.json import HEAD, finding_object

if TYPE_CHECKING:
    from ddpdoctor.finding import Finding
    from ddpdoctor.launch.job import LaunchedJob
    from ddpdoctor.metrics import MetricsServer
    from ddpdoctor.monitor.snapshot import RankView, Snapshot
    from ddpdoctor.profile.watch import RunSource

LONGEST_S = 30.0
"""The command is killed, with all that it has started, when it takes longer."""
HELD_NS = 5_000_000_000
"""A hang has to be shown for so long before something is done that may end the job."""
LOOK_EVERY_S = 0.1
"""At whether the command is to be killed."""
OUTPUT_FILE = "on-hang.log"


def read_command(text: str) -> tuple[str, ...]:
    """Return the words of a command as a shell would divide them; raises UsageError when there is no such program."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--on-hang: {str(error).lower()}", "Quote it as you would in a shell.") from error
    if not words:
        raise UsageError("--on-hang has no command")
    if shutil.which(words[0]) is None:
        where = "no such program" if os.sep in words[0] else "no such program on the PATH"
        raise UsageError(
            f"--on-hang: {words[0]}: {where}",
            "It is not run by a shell; for pipes and variables write `--on-hang \"sh -c '...'\"`.",
        )
    return words


class HangCommand:
    """Waits for a proved hang in what it is shown, and runs the command then."""

    def __init__(
        self, words: tuple[str, ...], directory: Path, job: LaunchedJob | None = None, longest_s: float = LONGEST_S
    ) -> None:
        """Its output goes to a file of the run's ``directory``; ``job`` is the one that was started here."""
        self._words = words
        self._directory = directory
        self._job = job
        self._longest_s = longest_s
        self._since_ns: int | None = None
        self._last: Snapshot | None = None
        """The last that showed a hang."""
        self._thread: threading.Thread | None = None
        self._until_s = 0.0
        self._is_closed = False
        self._is_to_be_killed = False
        self.name = plain(Path(words[0]).name)
        """Of the program alone: its arguments may hold a password, or an address that is one."""
        self.note = ""
        """What happened to it, as a sentence without a full stop; empty as long as nothing did."""

    def take(self, snapshot: Snapshot) -> None:
        """See whether the job hangs, and has done so for a while."""
        if self._thread is not None or self._is_closed or self._was_told_to_end() or snapshot.state == "ended":
            return
        if snapshot.stall is None or not snapshot.stall.proved:
            self._since_ns = self._last = None
            return
        self._since_ns = self._since_ns or snapshot.now_ns
        self._last = snapshot
        if snapshot.now_ns - self._since_ns >= HELD_NS:
            self._start(snapshot)

    def close(self, *, ended: bool) -> None:
        """Start nothing from now on; ``ended``: the job has.

        A hang with which the job ended by itself, before it was shown for long enough, is told now.
        """
        if ended and not self._is_closed and not self._was_told_to_end() and self._thread is None and self._last:
            self._start(self._last)
        self._is_closed = True

    @property
    def runs(self) -> bool:
        """Whether the command was started, and has not ended."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def left_s(self) -> float:
        """How long it may still take."""
        return max(0.0, self._until_s - time.monotonic())

    def kill(self) -> None:
        """Have the command killed, with all that it has started."""
        self._is_to_be_killed = True

    def _was_told_to_end(self) -> bool:
        """Return whether whoever watches the job has ended it: they know."""
        return self._job is not None and self._job.told_to_end

    def _start(self, snapshot: Snapshot) -> None:
        told = msgspec.json.encode(as_object(snapshot, str(Path.cwd())))
        self.note = f"--on-hang: `{self.name}` was notified of the hang and is still running"
        self._until_s = time.monotonic() + self._longest_s
        self._thread = threading.Thread(target=self._run, args=(told + b"\n",), name="ddpdoctor-on-hang", daemon=True)
        with without_signals():
            self._thread.start()

    def _run(self, told: bytes) -> None:
        began_s = time.monotonic()
        try:
            with self._output() as output:
                process = subprocess.Popen(
                    self._words,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=unblock_signals,  # We keep ours back; it has to hear its own.
                )
        except OSError as error:
            self.note = f"--on-hang: `{self.name}` could not be run: {error.strerror or error}"
            return
        # It may end without reading all of it: a thread of its own, for of many ranks it is more than a pipe holds.
        threading.Thread(target=_give, args=(process.stdin, told), name="ddpdoctor-on-hang-in", daemon=True).start()
        if not self._ends(process):
            # What it has left in the background is let be where it ended by itself.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            killed_by_user = f"--on-hang: `{self.name}` was killed by your interrupt"
            took_long = f"--on-hang: `{self.name}` took longer than {self._longest_s:.0f} s and was killed"
            self.note = killed_by_user if self._is_to_be_killed else took_long
            return
        code, seconds = process.returncode, time.monotonic() - began_s
        said = f"failed with exit code {code}" if code > 0 else f"was killed by signal {-code}"
        self.note = (
            f"--on-hang: `{self.name}` was notified of the hang and finished after {seconds:.1f} s"
            if code == 0
            else f"--on-hang: `{self.name}` {said}; its output is in {self._directory / OUTPUT_FILE}"
        )

    def _ends(self, process: subprocess.Popen[bytes]) -> bool:
        """Return whether it ends before its time is over and before it is to be killed."""
        while not self._is_to_be_killed and (left_s := self.left_s) > 0:
            with suppress(subprocess.TimeoutExpired):
                process.wait(min(LOOK_EVERY_S, left_s))
                return True
        return False

    def _output(self) -> IO[bytes]:
        try:
            return (self._directory / OUTPUT_FILE).open("wb")
        except OSError:
            return Path(os.devnull).open("wb")


def _give(stdin: IO[bytes] | None, told: bytes) -> None:
    """Write all of it; that no one reads it is no fault."""
    with suppress(OSError):
        if stdin is not None:
            with stdin:
                stdin.write(told)


def as_object(snapshot: Snapshot, root: str) -> dict[str, Any]:
    """Build what the command reads: the hang in one text, its culprits, its sides, and the finding that tells it."""
    stall = snapshot.stall
    if stall is None:
        raise ValueError("this snapshot has no hang")
    finding = _finding(snapshot)
    named = {rank for side in stall.sides if side.culprit for rank in side.ranks}
    return {
        **HEAD,
        "event": "hang",
        "text": plain(f"{snapshot.name}: {stall.title}" + (f". {stall.remedy}" if stall.remedy else "")),
        "name": plain(snapshot.name),
        "run_directory": snapshot.run_directory,
        "command": [plain(word) for word in snapshot.command],
        "host": socket.gethostname(),
        "world_size": snapshot.world_size,
        "steps": snapshot.steps,
        "stood_s": round(max(0, snapshot.now_ns - stall.since_ns) / 1e9, 3),
        "timeout_in_s": None
        if stall.timeout_at_ns is None
        else round(max(0, stall.timeout_at_ns - snapshot.now_ns) / 1e9, 3),
        "culprits": [_culprit(rank) for rank in snapshot.ranks if rank.rank in named],
        "sides": [
            {
                "ranks": list(side.ranks),
                "text": plain(side.text),
                "culprit": side.culprit,
                "stack": [{"file": frame.file, "line": frame.line, "function": frame.function} for frame in side.stack],
            }
            for side in stall.sides
        ],
        "finding": finding_object(finding, root) if finding is not None else None,
    }


def _finding(snapshot: Snapshot) -> Finding | None:
    """Return the finding that tells the standstill."""
    holding = [view.finding for view in snapshot.findings if view.until_ns is None]
    title = snapshot.stall.title if snapshot.stall is not None else ""
    told = [finding for finding in holding if finding.title == title]
    told += [finding for finding in holding if finding.code == snapshot.verdict.code]
    return told[0] if told else None


def _culprit(rank: RankView) -> dict[str, Any]:
    where = None if rank.where is None else {"file": rank.where.file, "line": rank.where.line}
    return {"rank": rank.rank, "host": rank.host, "pid": rank.pid, "state": plain(rank.state), "where": where}


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
