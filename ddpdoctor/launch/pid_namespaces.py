"""Numbers of processes inside and outside of a container: there each process has another one than out here."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from ddpdoctor.record import layout

SCAN_EVERY_S = 1.0
SCAN_SHARE = 0.02
"""Of one core: a look at 10,000 processes takes 0.2 s, and comes every 10 s then."""


def numbers_of(pid: int) -> tuple[int, ...]:
    """Return the numbers of a process from ours to that of the innermost namespace; only its own where unknown."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            words = next(line for line in file if line.startswith("NSpid:")).split()[1:]
    except (OSError, StopIteration):
        return (pid,)
    return tuple(map(int, words)) or (pid,)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return _state(pid) not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        if os.path.exists("/proc/self"):
            return False
    except (OSError, IndexError):
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process; False where the platform does not say."""
    try:
        return _state(pid) in ("T", "t")
    except (OSError, IndexError):
        return False


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0]


def carries_run(pid: int, directory: Path | str) -> bool | None:
    """Return whether a process was started for the run in ``directory``; None where its environment cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return None
    prefix = layout.RUN_VARIABLE.encode() + b"="
    names = (os.fsdecode(entry[len(prefix) :]) for entry in entries if entry.startswith(prefix))
    return any(os.path.realpath(name) == os.path.realpath(directory) for name in names)


def is_of_run(pid: int, directory: Path | str) -> bool | None:
    """Return whether a process is of the run in ``directory``; None where neither its environment nor its files are
    seen.

    One whose environment says nothing, as after ``setproctitle`` or a fork in a notebook, holds files of the run open.
    """
    carries = carries_run(pid, directory)
    return carries if carries is not False else _holds_files(pid, directory)


def _holds_files(pid: int, directory: Path | str) -> bool | None:
    """Ask for files that it may write: who watches the run reads them. By inode, for a container has other names."""
    opened = f"/proc/{pid}/fd"
    try:
        kept = {_inode(directory, name) for name in os.listdir(directory)} - {None}
        descriptors = os.listdir(opened)
    except PermissionError:
        return None
    except OSError:
        return False
    return any(_inode(opened, descriptor) in kept and _may_write(pid, descriptor) for descriptor in descriptors)


def _inode(directory: Path | str, name: str) -> tuple[int, int] | None:
    try:
        status = os.stat(os.path.join(directory, name))
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _may_write(pid: int, descriptor: str) -> bool:
    try:
        with open(f"/proc/{pid}/fdinfo/{descriptor}", encoding="ascii") as file:
            flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return False
    return flags & os.O_ACCMODE != os.O_RDONLY


def number_inside(pid: int) -> int:
    """Return the number by which a process knows itself."""
    return numbers_of(pid)[-1]


def thread_outside(outer: int, thread: int) -> int | None:
    """Return the number out here of a thread that knows itself as ``thread``; ``outer`` is its process out here."""
    if len(numbers_of(outer)) == 1:
        return thread
    try:
        threads = [int(name) for name in os.listdir(f"/proc/{outer}/task")]
    except OSError:
        return None
    return next((one for one in threads if number_inside(one) == thread), None)


class OuterPids:
    """The numbers out here of the processes of a run, which may be in a container and know themselves by others.

    A process is known by the run in its environment or by the files of it that it holds open; where neither can be
    seen, one that has the number counts where no other does. A signal to an unrelated process may end it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = os.path.realpath(directory)
        self._outer: dict[int, int] = {}
        self._inside: dict[int, list[int]] = {}
        """Processes of containers by the number that they have in there, …"""
        self._scans_again_s = float("-inf")
        """… until this moment, on the monotonic clock."""

    def __call__(self, pid: int) -> int | None:
        """Return the number out here of one that calls itself ``pid``; None when it is gone, or not seen from here."""
        known = self._outer.get(pid)
        if known is not None:
            return known if is_alive(known) and number_inside(known) == pid else None
        is_here = is_of_run(pid, self._directory) if is_alive(pid) and number_inside(pid) == pid else False
        if is_here:
            return self._outer.setdefault(pid, pid)
        for outer in self._in_containers().get(pid, ()):
            if is_of_run(outer, self._directory) and is_alive(outer):
                return self._outer.setdefault(pid, outer)
        return self._outer.setdefault(pid, pid) if is_here is None else None

    def was_seen(self, pid: int) -> bool:
        """Return whether one that calls itself so was seen alive once."""
        return pid in self._outer

    def is_alive(self, pid: int) -> bool:
        """Return whether one that calls itself so lives."""
        return self(pid) is not None

    def is_stopped(self, pid: int) -> bool:
        """Return whether a signal or a debugger has stopped one that calls itself so."""
        outer = self(pid)
        return outer is not None and is_stopped(outer)

    def of_ranks(self, pids: Mapping[int, int]) -> dict[int, int]:
        """Return the numbers out here of processes given by rank, those that were seen alive once."""
        for pid in pids.values():
            self(pid)
        return {rank: self._outer[pid] for rank, pid in pids.items() if pid in self._outer}

    def is_inside(self, pid: int) -> bool:
        """Return whether a process of the run lives that calls itself so, in a container."""
        outside = self._in_containers().get(pid, ())
        return any(is_of_run(outer, self._directory) and is_alive(outer) for outer in outside)

    def _in_containers(self) -> dict[int, list[int]]:
        begun_s = time.monotonic()
        if begun_s >= self._scans_again_s:
            self._inside = {}
            for outer in _processes():
                numbers = numbers_of(outer)
                if len(numbers) > 1:
                    self._inside.setdefault(numbers[-1], []).append(outer)
            ended_s = time.monotonic()
            self._scans_again_s = ended_s + max(SCAN_EVERY_S, (ended_s - begun_s) / SCAN_SHARE)
        return self._inside


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
