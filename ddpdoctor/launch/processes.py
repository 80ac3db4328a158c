"""Owns the processes of a job that we launched: starts them, knows all of them, ends all of them."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from ddpdoctor.errors import UsageError
from ddpdoctor.launch.box.start import Box
from ddpdoctor.launch.pid_namespaces import carries_run, is_alive
from ddpdoctor.probe.process import GET_CHILD_SUBREAPER, SET_CHILD_SUBREAPER, process_control

if TYPE_CHECKING:
    import psutil

_END_AT_MOST_S = 10.0
"""Two ranks that were killed took more than 2 s to end where each core had three jobs to run."""


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
        """Return the process that a rank means by ``pid``, which in a box is another number; None when it is gone."""
        return pid if self._box is None else self._box.outer_pid(pid)

    def end(self) -> None:
        """Kill every process of the job and wait until none is left, not even as a zombie of ours, or ten seconds."""
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
        found.update(
            (pid, None) for pid in psutil.pids() if pid != os.getpid() and carries_run(pid, self._run_directory)
        )
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
def without_signals() -> Iterator[None]:
    """Threads that are started meanwhile never take a signal: one that is kept back here would end the process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
    before = ctypes.c_int(0)
    process_control(GET_CHILD_SUBREAPER, ctypes.byref(before))
    process_control(SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        process_control(SET_CHILD_SUBREAPER, before.value)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return


# Finds the ranks of a job that runs now and was not started with us: by the environment that launchers give them.

_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_WORLDS = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_LOCALS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_JOBS = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
_SPAWNED = "multiprocessing.spawn"
_SETTINGS = frozenset(
    {
        "HOME", "MASTER_ADDR", "MASTER_PORT", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_WORKER_SERVER_SOCKET", "XDG_CACHE_HOME",
    }
)  # fmt: skip
"""Variables that say where a rank's flight recorder can be asked."""


class RunningRank(msgspec.Struct, frozen=True, kw_only=True):
    """The process of a rank."""

    rank: int
    local_rank: int = 0
    world_size: int = 0
    """0 where its environment does not say."""
    pid: int
    host: str = ""
    directory: str = ""
    """Its working directory."""
    job: str = ""
    """Equal for the ranks of one job."""
    launcher: int = 0
    """The process that started it; 0 where that is gone."""
    settings: dict[str, str] = {}
    """Of its environment, what says where its flight recorder can be asked."""


def running_ranks(pids: Sequence[int]) -> tuple[RunningRank, ...]:
    """Return the ranks among the named processes and their children, or of the only job of this user on this machine.

    Raises UsageError when there is none, or when several jobs run and none is named.
    """
    found: dict[str, dict[int, RunningRank]] = {}
    for process in _processes(pids):
        rank = _rank_of(process)
        if rank is not None:
            # Of a rank and its loader workers, which inherit its environment, the oldest process is the rank.
            found.setdefault(rank.job, {}).setdefault(rank.rank, rank)
    if not found and pids:
        found = {"spawned": dict(enumerate(_spawned(pids)))}
    if not any(found.values()):
        raise UsageError(
            f"neither process {pids[0]} nor its children are ranks"
            if pids
            else "none of your ranks runs on this machine",
            "Ranks are recognised by RANK, SLURM_PROCID or OMPI_COMM_WORLD_RANK in their environment; pass the pid of "
            "the launcher, or run this as the user who runs the job.",
        )
    if len(found) > 1:
        jobs = [list(ranks.values()) for ranks in found.values()]
        named = "; ".join(f"{len(ranks)} ranks, pid {min(rank.pid for rank in ranks)}" for ranks in jobs)
        raise UsageError(f"{len(jobs)} jobs run on this machine: {named}", "Choose one by the pid of its launcher.")
    (ranks,) = found.values()
    return tuple(ranks[number] for number in sorted(ranks))


def _processes(pids: Sequence[int]) -> list[psutil.Process]:
    """Return the named processes with their children and their ranks' siblings, or all of this user's; oldest first."""
    import psutil

    if not pids:
        mine = []
        for process in psutil.process_iter():
            try:
                if process.uids().real == os.getuid() and process.pid != os.getpid():
                    mine.append(process)
            except psutil.Error:
                continue
        return _oldest_first(mine)
    named: dict[int, psutil.Process] = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            family = [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess as error:
            raise UsageError(f"there is no process {pid}", "`ps -ef | grep torchrun` lists launchers.") from error
        except psutil.Error as error:
            raise UsageError(f"process {pid} may not be inspected: {error}") from error
        named |= {one.pid: one for one in (*family, *_siblings(process))}
    return _oldest_first(list(named.values()))


def _siblings(process: psutil.Process) -> list[psutil.Process]:
    """Return the processes of the job that a rank, or a loader's worker of one, belongs to; none for a launcher."""
    import psutil

    own = _rank_of(process)
    if own is None:
        try:
            parent = process.parent()
            return parent.children(recursive=True) if parent is not None and _is_spawned(process) else []
        except (psutil.Error, OSError):
            return []
    found = []
    for other in _processes(()):
        rank = _rank_of(other)
        if rank is not None and rank.job == own.job and (own.job.strip("/") or rank.launcher == own.launcher):
            found.append(other)
    return found


def children_of(pid: int) -> list[int]:
    """Return the Python processes below a process, which may be workers of its loaders."""
    import psutil

    found = []
    try:
        for child in psutil.Process(pid).children(recursive=True):
            if os.path.basename(child.exe() or "").startswith("python"):
                found.append(child.pid)
    except psutil.Error:
        return found
    return found


def _is_spawned(process: psutil.Process) -> bool:
    words = process.cmdline()
    return any(_SPAWNED in word for word in words) and "spawn_main" in " ".join(words)


def _oldest_first(processes: list[psutil.Process]) -> list[psutil.Process]:
    import psutil

    born = []
    for process in processes:
        try:
            born.append((process.create_time(), process.pid, process))
        except psutil.Error:
            continue
    return [process for _, _, process in sorted(born, key=lambda one: one[:2])]


def _rank_of(process: psutil.Process) -> RunningRank | None:
    """Return the rank that a process is; None for any other, and for one that is gone or may not be inspected."""
    import psutil

    try:
        environment = process.environ()
        number = _first(environment, _RANKS)
        if number is None or not os.path.basename(process.exe() or "").startswith("python"):
            return None
        return RunningRank(
            rank=number,
            local_rank=_first(environment, _LOCALS) or 0,
            world_size=_first(environment, _WORLDS) or 0,
            pid=process.pid,
            host=socket.gethostname(),
            directory=process.cwd(),
            launcher=process.ppid() if process.ppid() > 1 else 0,
            job="/".join(environment.get(name, "") for name in _JOBS),
            settings={name: environment[name] for name in sorted(_SETTINGS & environment.keys())},
        )
    except (psutil.Error, OSError):
        return None


def _spawned(pids: Sequence[int]) -> list[RunningRank]:
    """Return what ``mp.spawn`` has started: it numbers its processes in the order of their start."""
    import psutil

    found = []
    for process in _processes(pids):
        try:
            if _is_spawned(process):
                found.append(process)
        except psutil.Error:
            continue
    host = socket.gethostname()
    return [
        RunningRank(
            rank=number, local_rank=number, world_size=len(found), pid=process.pid, host=host, directory=process.cwd()
        )
        for number, process in enumerate(found)
    ]


def _first(environment: Mapping[str, str], names: Sequence[str]) -> int | None:
    return next((int(environment[name]) for name in names if environment.get(name, "").isdecimal()), None)
