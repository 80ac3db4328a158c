"""A job that we started to watch it: it keeps our terminal and our process group, and outlives us if we die."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ddpdoctor.errors import UsageError
from ddpdoctor.launch.kept_output import KeptOutput
from ddpdoctor.launch.pid_namespaces import number_inside
from ddpdoctor.launch.processes import handles
from ddpdoctor.probe.process import RANK_PROCESS_VARIABLE
from ddpdoctor.record import layout
from ddpdoctor.record.assembly.ranks import RankBook
from ddpdoctor.record.events import typed
from ddpdoctor.record.reader import RunFiles

if TYPE_CHECKING:
    import psutil


# The processes of a watched job that run now: its launchers, its ranks, and what these have started.

_MOST_LETTERS = 80


class RunProcess(NamedTuple):
    """One of them."""

    pid: int
    command: str
    is_rank: bool
    starts_ranks: bool
    """It is a rank's parent, and no rank."""
    is_apart: bool
    """A rank has started it, in a session of its own."""


class RunProcesses:
    """Finds the processes of one run."""

    def __init__(self, directory: Path, since_s: float, session: int) -> None:
        """``since_s`` is when its launcher was started, on the system's clock, in the session ``session``."""
        self._directory = directory
        self._since_s = since_s
        self._session = session
        self._files = RunFiles(directory)
        self._book = RankBook()

    def living(self) -> list[RunProcess]:
        """Return those that live, without zombies and without us."""
        import psutil

        found: dict[int, tuple[psutil.Process, dict[str, str], int]] = {}
        for process in psutil.process_iter():
            try:
                # A shell in which the variable was exported by hand is older than the job.
                if process.pid == os.getpid() or process.create_time() < self._since_s - 1:
                    continue
                environment = process.environ()
                carries = environment.get(layout.RUN_VARIABLE) == str(self._directory)
                if carries and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = process, environment, os.getsid(process.pid)
            except (psutil.Error, OSError):
                continue
        known = self._ranks()
        ranks = {pid for pid in found if number_inside(pid) in known}
        sessions = {self._session, *known, *(found[pid][2] for pid in ranks)}
        launchers = {pid for pid, (_, environment, _) in found.items() if "RANK" not in environment}
        parents = {_parent(found[pid][0]) for pid in ranks} - ranks
        return [
            RunProcess(
                pid=pid,
                command=_command(process),
                is_rank=pid in ranks,
                starts_ranks=pid in parents,
                is_apart=pid not in ranks
                and session not in sessions
                # What starts to be a rank has not said so yet; its parent is the launcher.
                and (RANK_PROCESS_VARIABLE in environment or _parent(process) not in launchers),
            )
            for pid, (process, environment, session) in found.items()
        ]

    def _ranks(self) -> set[int]:
        """Ranks of which anything is known, by their own numbers."""
        for pid, event in self._files.poll():
            with suppress(ValueError):
                self._book.take(pid, typed(event))
        return {pid for pid, entry in self._book.processes.items() if entry.rank is not None}


def _parent(process: psutil.Process) -> int:
    import psutil

    try:
        return process.ppid()
    except psutil.Error:
        return 0


def _command(process: psutil.Process) -> str:
    import psutil

    try:
        text = shlex.join(process.cmdline()) or process.name()
    except psutil.Error:
        return "?"
    return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 1] + "…"


_KILL_AT_MOST_S = 3.0
AGAIN_AFTER_S = 2.0
"""A second signal that comes sooner is the first one once more: `timeout` signals its child, then the whole group, and
some schedulers send it twice. It must not take away the time in which a checkpoint is saved."""
RANKS_GET_S = 30.0
"""Ranks that outlive their launcher may save a checkpoint for so long, as torchrun lets them, before they are reported
to
end, and for as long again before they are killed."""
_SETTLES_S = 1.0
"""In this time the workers of ranks that have ended notice it."""


class LaunchedJob:
    """The launcher of a job that we started, and what came of it."""

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        run_directory: Path,
        *,
        output: int | None = None,
        apart: Path | None = None,
    ) -> None:
        """Start it with our own stdin, stdout and stderr; ``output`` takes the place of its stdout.

        With ``apart``, a file that takes what it prints, it gets a session of its own, and nothing to read.
        Signals that are blocked here are not blocked there. Raises UsageError when it cannot be started.
        """
        started_s = time.time()
        self._told_at_s: float | None = None
        self.is_apart = apart is not None
        """It has a session of its own: what the terminal sends does not reach it."""
        self._kept: KeptOutput | None = None
        try:
            if apart is not None:
                self._kept = KeptOutput(apart)
                output = self._kept.pipe
            self._launcher = subprocess.Popen(
                list(words),
                env=dict(environment),
                stdin=subprocess.DEVNULL if self.is_apart else None,
                stdout=output,
                stderr=subprocess.STDOUT if self.is_apart else None,
                start_new_session=self.is_apart,
                preexec_fn=unblock_signals,
            )
        except OSError as error:
            raise UsageError(f"cannot start {words[0]}: {error.strerror or error}") from error
        finally:
            if self._kept is not None:
                self._kept.close()
        session = self._launcher.pid if self.is_apart else os.getsid(0)
        self._processes = RunProcesses(run_directory, started_s, session)

    @property
    def pid(self) -> int:
        """Process id of the launcher."""
        return self._launcher.pid

    @property
    def output_is_whole(self) -> bool:
        """Whether the file of a job that is apart holds all that it has printed; waits for its last lines."""
        return self._kept is None or self._kept.is_whole()

    @property
    def told_to_end(self) -> bool:
        """Whether a signal that asks it to end was passed on."""
        return self._told_at_s is not None

    def exit_code(self) -> int | None:
        """Exit code as a shell gives it, 128 + N for a signal N; None while the launcher runs."""
        code = self._launcher.poll()
        return code if code is None or code >= 0 else 128 - code

    def forward(self, number: int) -> None:
        """Pass a signal on to the launcher, which passes it on to its ranks; a later one kills all of them."""
        if self._is_first():
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
        """Take note of a Ctrl-C that the terminal sent to all processes of the job, too; a later one kills them."""
        self._is_first()

    def _is_first(self) -> bool:
        """Return whether this is the first time that the job is told to end; kill it when it is told again."""
        if self._told_at_s is None:
            self._told_at_s = time.monotonic()
            return True
        if time.monotonic() - self._told_at_s >= AGAIN_AFTER_S:
            self.kill()
        return False

    def end_leftovers(self, wait: Callable[[], None], say: Callable[[str], None]) -> None:
        """End the ranks that a launcher which was told to end has left, as torchrun does; of another job report them.

        ``wait`` sleeps a moment, and passes on what the user wants meanwhile. What a rank has started in a session of
        its own, or what is no rank, is left alone, and ``say`` reports it.
        """
        ended_s = time.monotonic()
        is_said = ranks_are_told = False
        if not self.told_to_end:
            while (left := self._living_ranks()) and time.monotonic() - ended_s < _SETTLES_S:
                wait()
            if left and not self.told_to_end:
                numbers = " ".join(str(process.pid) for process in left)
                say(
                    f"the launcher has ended, but ranks of the job have not: {_listed(left)}; `kill {numbers}` ends"
                    " them"
                )
                return
        while left := self.living():
            ranks, lasted_s = [process for process in left if process.is_rank], time.monotonic() - ended_s
            if lasted_s < _SETTLES_S:
                pass
            elif not ranks:
                say(f"of the job, these are still running: {_listed(left)}")
                return
            elif not is_said:
                is_said = True
                say(
                    f"the launcher has ended, but ranks of the job have not: {_listed(ranks)}; they are asked to stop "
                    f"in {RANKS_GET_S:.0f} s, and the next Ctrl-C or SIGTERM kills them"
                )
            elif lasted_s >= 2 * RANKS_GET_S:
                self._kill(lambda process: process.is_rank or process.starts_ranks)
            elif lasted_s >= RANKS_GET_S and not ranks_are_told:
                ranks_are_told = True
                # Who has started them ends them, and does not start them anew.
                _signal_all([process for process in left if process.starts_ranks] or ranks, signal.SIGTERM)
            wait()

    def _living_ranks(self) -> list[RunProcess]:
        return [process for process in self.living() if process.is_rank]

    def living(self) -> list[RunProcess]:
        """Return the processes of the job that live, the launcher's included."""
        return self._processes.living()

    def kill(self) -> None:
        """Kill the launcher and all that was started by it, but for what a rank has started in a session of its own."""
        self._kill(lambda process: not process.is_apart)

    def _kill(self, is_meant: Callable[[RunProcess], bool]) -> None:
        deadline = time.monotonic() + _KILL_AT_MOST_S
        while time.monotonic() < deadline:
            meant = [process for process in self.living() if is_meant(process)]
            _signal_all(meant, signal.SIGKILL)
            if self._launcher.poll() is None:
                self._launcher.kill()
            elif not meant:
                return
            time.sleep(0.02)


def _signal_all(processes: Sequence[RunProcess], number: signal.Signals) -> None:
    for process in processes:
        try:
            os.kill(process.pid, number)
        except OSError:
            continue


def _listed(processes: Sequence[RunProcess]) -> str:
    return ", ".join(f"{process.pid} ({process.command})" for process in processes)


def unblock_signals() -> None:
    """Hear every signal, in a child that is about to become another program."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
