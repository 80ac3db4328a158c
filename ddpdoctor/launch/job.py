"""A job that we started to watch it: it keeps our terminal and our process group, and outlives us if we die."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from ddpdoctor.errors import UsageError
from ddpdoctor.launch.processes import handles
from ddpdoctor.record import layout

_KILL_AT_MOST_S = 3.0


class LaunchedJob:
    """The launcher of a job that we started, and what came of it."""

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        run_directory: Path,
        *,
        output: IO[bytes] | int | None = None,
        apart: bool = False,
    ) -> None:
        """Start it with our own stdin, stdout and stderr; ``output`` takes the place of its stdout.

        With ``apart`` it gets a session of its own, nothing to read, and writes its stderr to ``output``, too.
        Signals that are blocked here are not blocked there. Raises UsageError when it cannot be started.
        """
        self._run_directory = str(run_directory)
        self._started_s = time.time()
        self._told_to_end = False
        self.is_apart = apart
        """It has a session of its own: what the terminal sends does not reach it."""
        try:
            self._launcher = subprocess.Popen(
                list(words),
                env=dict(environment),
                stdin=subprocess.DEVNULL if apart else None,
                stdout=output,
                stderr=subprocess.STDOUT if apart else None,
                start_new_session=apart,
                preexec_fn=unblock_signals,
            )
        except OSError as error:
            raise UsageError(f"cannot start {words[0]}: {error.strerror or error}") from error

    @property
    def pid(self) -> int:
        """Process id of the launcher."""
        return self._launcher.pid

    @property
    def told_to_end(self) -> bool:
        """Whether a signal that asks it to end was passed on."""
        return self._told_to_end

    def exit_code(self) -> int | None:
        """Exit code as a shell gives it, 128 + N for a signal N; None while the launcher runs."""
        code = self._launcher.poll()
        return code if code is None or code >= 0 else 128 - code

    def forward(self, number: int) -> None:
        """Pass a signal on to the launcher, which passes it on to its ranks; a second one kills all of them."""
        if self._told_to_end:
            self.kill()
            return
        self._told_to_end = True
        try:
            self._launcher.send_signal(number)
        except OSError:
            return

    def notify(self, number: int) -> int:
        """Send a signal to the uppermost processes of the job that handle it; how many those are.

        What they started may have inherited the handler, as the workers of a loader do, which are not meant.
        """
        import psutil

        told, above = 0, [self._launcher.pid]
        while above:
            pid = above.pop()
            try:
                if handles(pid, number):
                    os.kill(pid, number)
                    told += 1
                else:
                    above += [child.pid for child in psutil.Process(pid).children()]
            except (psutil.Error, OSError):
                continue
        return told

    def was_told_by_the_terminal(self) -> None:
        """Take note of a Ctrl-C that the terminal sent to all processes of the job, too; a second one kills them."""
        if self._told_to_end:
            self.kill()
        self._told_to_end = True

    def end_leftovers(self) -> None:
        """Kill what a launcher that was told to end has left running; does nothing after a job that ended by itself."""
        if self._told_to_end:
            self.kill()

    def kill(self) -> None:
        """Kill the launcher and every process that carries the run in its environment and was started after it."""
        deadline = time.monotonic() + _KILL_AT_MOST_S
        while time.monotonic() < deadline:
            alive = self._alive()
            for pid in alive:
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    continue
            if self._launcher.poll() is not None and not alive:
                return
            time.sleep(0.02)

    def _alive(self) -> list[int]:
        import psutil

        found = [self._launcher.pid] if self._launcher.poll() is None else []
        for process in psutil.process_iter():
            try:
                if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                # A shell in which the variable was exported by hand is older than the job.
                if process.create_time() >= self._started_s - 1 and (
                    process.environ().get(layout.RUN_VARIABLE) == self._run_directory
                ):
                    found.append(process.pid)
            except (psutil.Error, OSError):
                continue
        return found


def unblock_signals() -> None:
    """Hear every signal, in a child that is about to become another program."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
