"""Finds the ranks of a job that runs now and was not started with us: by the environment that launchers give them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from ddpdoctor.errors import UsageError

if TYPE_CHECKING:
    import psutil

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
    import psutil

    found: dict[str, dict[int, RunningRank]] = {}
    for process in _processes(pids):
        try:
            rank = _rank_of(process)
        except (psutil.Error, OSError):
            continue
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

    try:
        own = _rank_of(process)
        if own is None:
            parent = process.parent()
            return parent.children(recursive=True) if parent is not None and _is_spawned(process) else []
    except (psutil.Error, OSError):
        return []
    found = []
    for other in _processes(()):
        try:
            rank = _rank_of(other)
        except (psutil.Error, OSError):
            continue
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
    environment = process.environ()
    number = _first(environment, _RANKS)
    name = os.path.basename(process.exe() or "")
    if number is None or not name.startswith("python"):
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
