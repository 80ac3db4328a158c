"""Owns the processes of a job that we launched: starts them, knows all of them, ends all of them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ddpdoctor.launch.box.start import Box
from ddpdoctor.launch.pid_namespaces import is_alive
from ddpdoctor.record import layout

_SET_CHILD_SUBREAPER = 36
_GET_CHILD_SUBREAPER = 37
_END_AT_MOST_S = 2.0


class JobProcesses:
    """The launcher and all that came of it, orphans included."""

    def __init__(
        self, launcher: subprocess.Popen[bytes], before: frozenset[int], run_directory: Path, box: Box | None
    ) -> None:
        self._launcher = launcher
        self._box = box
        self._before = before
        self._seen: set[int] = set()
        """Processes of the job that were alive at some look."""
        self.left: tuple[int, ...] = ()
        """Processes that were killed and did not end: the kernel holds them, for a disk or a driver."""
        self._run_directory = run_directory

    def launcher_exit_code(self) -> int | None:
        """Exit code of the launcher; None while it runs."""
        return self._launcher.poll()

    def outer_pid(self, pid: int) -> int | None:
        """Return the process that a rank means by ``pid``: in a box processes have other numbers; None when it is
        gone.
        """
        return pid if self._box is None else self._box.outer_pid(pid)

    def end(self) -> None:
        """Kill every process of the job and wait until none is left, not even as a zombie of ours, or two seconds."""
        if self._box is not None:
            self._box.end()
        deadline = time.monotonic() + _END_AT_MOST_S
        while time.monotonic() < deadline:
            alive = self._alive()
            self._seen.update(alive)
            for pid in alive:
                _kill(pid)
            self._launcher.poll()
            if not self._reap() and not alive:
                return
            time.sleep(0.02)
        self.left = tuple(self._alive())

    def _reap(self) -> bool:
        """Take leave of the dead among the processes that we adopted; True while some are left."""
        import psutil

        left = False
        for child in psutil.Process().children():
            if child.pid not in self._before and child.pid != self._launcher.pid and self._is_ours(child.pid):
                left = True
                try:
                    os.waitpid(child.pid, os.WNOHANG)
                except OSError:
                    continue
        return left or self._launcher.poll() is None

    def note(self, pids: Iterable[int]) -> None:
        """Take down processes that are known to belong to the job, by the numbers that they have themselves."""
        self._seen.update(pid for pid in map(self.outer_pid, pids) if pid is not None)

    def _is_ours(self, pid: int) -> bool:
        """Return whether a process that we became the parent of belongs to the job, dead or alive."""
        if pid in self._seen:
            return True
        try:
            return os.getsid(pid) in (self._launcher.pid, *self._seen)
        except OSError:
            return False

    def _alive(self) -> list[int]:
        """Every process below the launcher, and every one that carries the run in its environment."""
        import psutil

        found: dict[int, None] = {}
        if self._launcher.poll() is None:
            try:
                children = psutil.Process(self._launcher.pid).children(recursive=True)
                found.update(dict.fromkeys(child.pid for child in children))
            except psutil.Error:
                pass
            found[self._launcher.pid] = None
        marker = str(self._run_directory)
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get(layout.RUN_VARIABLE) == marker:
                    found[process.pid] = None
            except (psutil.Error, OSError):
                continue
        return [pid for pid in found if is_alive(pid)]


def handles(pid: int, number: int) -> bool:
    """Return whether the process has a handler of its own for the signal; raises OSError when it is gone."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def start_plainly(
    command: list[str], environment: Mapping[str, str], directory: Path, output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a command in ``directory``, in a session of its own, with nothing to read."""
    return subprocess.Popen(
        command,
        env=dict(environment),
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@contextmanager
def started(start: Callable[[], subprocess.Popen[bytes] | Box], run_directory: Path) -> Iterator[JobProcesses]:
    """Start a job by calling ``start``; on leaving, whatever happened, none of its processes is left."""
    import psutil

    with _adopting_orphans():
        before = frozenset(child.pid for child in psutil.Process().children())
        launcher = start()
        box = launcher if isinstance(launcher, Box) else None
        process = launcher.process if isinstance(launcher, Box) else launcher
        processes = JobProcesses(process, before, run_directory, box)
        try:
            yield processes
        finally:
            with _undisturbed():
                processes.end()


@contextmanager
def interruptible() -> Iterator[None]:
    """Make SIGTERM and SIGHUP behave like Ctrl-C, so that they unwind and clean up too."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous: dict[signal.Signals, object] = {}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            previous[number] = signal.signal(number, interrupt)
    except ValueError:
        pass  # not the main thread: the host program keeps its own handling
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep a second Ctrl-C from cutting the clean-up short."""
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """On Linux, become the parent of ranks whose launcher died, so that they can be waited for."""
    process_control = None
    before = ctypes.c_int(0)
    if sys.platform == "linux":
        try:
            process_control = ctypes.CDLL(None, use_errno=True).prctl
            process_control(_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
            process_control(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        except (OSError, AttributeError):
            process_control = None
    try:
        yield
    finally:
        if process_control is not None:
            process_control(_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return
