"""Writes events from inside a training process; stdlib only, never raises into the training."""

from __future__ import annotations

import fcntl
import os
import resource
import time
from array import array
from json import dumps
from os import write
from typing import Any

from . import layout

MOST_EVENT_BYTES = 1 << 28
"""No event is written once the file of a process is so large …"""
END_EVENTS = frozenset({"exit", "os_exit", "raised", "ended"})
"""… but for the few that tell how it ended."""


class EventWriter:
    """Appends events of one process, each with one ``write``; goes quiet for good when the disk does not take them."""

    def __init__(self, run_directory: str, *, lazily: bool = False) -> None:
        self._run_directory = run_directory
        self._descriptor = -1
        self._broken = False
        self.lost = 0
        """Events that could not be written; reported with the next one that can."""
        self._told = 0
        self.moved_bytes = 0
        """Bytes that were written to the file."""
        self._unopened = True
        if not lazily:
            self.open()

    def open(self) -> None:
        """Open the file of this process; called again in a forked child."""
        self._unopened = False
        path = os.path.join(self._run_directory, layout.events_name(os.getpid()))
        try:
            self._descriptor = private_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError:
            self._broken = True

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; ``fields`` must be JSON values."""
        if self._unopened:
            self.open()
        if self._broken or (self.moved_bytes > MOST_EVENT_BYTES and event not in END_EVENTS):
            self.lost += 1
            return
        fields["event"] = event
        fields.setdefault("time_ns", epoch_ns())
        try:
            line = dumps(fields, separators=(",", ":"), default=str) + "\n"
            if self.lost > self._told:
                line = dumps({"event": "lost", "events": self.lost}) + "\n" + line
            content = line.encode("utf-8", "backslashreplace")
            self.moved_bytes += len(content)
            if fits(self.moved_bytes) and write(self._descriptor, content) == len(content):
                self._told = self.lost
            else:
                self.lost += 1
        except Exception:  # what a __str__ of the user's raises, too
            self.lost += 1

    def write_indices(self, number: int, indices: array[int]) -> str:
        """Write the sample indices of a pass to a file of their own; the name, or an empty string when it failed."""
        name = layout.indices_name(os.getpid(), number)
        try:
            if not fits(len(indices) * indices.itemsize):
                return ""
            with open(os.path.join(self._run_directory, name), "wb") as file:
                file.write(indices.tobytes())
        except OSError:
            return ""
        return name


# Opens the files of the record in a training process; stdlib only.

_BELOW_THE_LIMIT = 64
_AT_MOST = 1024
"""A fork copies the table of descriptors up to the highest one."""


def fits(size_bytes: int) -> bool:
    """Return whether a file may have this size: one that is too large ends a process that has given SIGXFSZ its
    default back, which Python ignores. Takes 0.3 µs.
    """
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return most == resource.RLIM_INFINITY or size_bytes <= most


def private_descriptor(path: str, flags: int) -> int:
    """Open a file with a descriptor that no file of the script's gets: one near the limit of the process.

    A script may close all descriptors (``os.closerange``), and the file that it opens next gets the lowest number:
    with ours, our rows would go into it. Raises OSError.
    """
    low = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = _AT_MOST if most == resource.RLIM_INFINITY else min(most, _AT_MOST)
        high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, max(0, most - _BELOW_THE_LIMIT))
    except (OSError, ValueError):
        return low
    os.close(low)
    return high


# The clock of everything that is recorded: the time of the epoch, without the jumps of a clock that is set.
#
# A rank and its monitor run on one machine and so have one monotonic clock; all add what lay between it and the time of
# the epoch when the first process of the run on this machine began, which the run's plan says.

_BOOT_FILE = "/proc/sys/kernel/random/boot_id"
_NAMESPACE_LINK = "/proc/self/ns/time"
"""In another one of these the monotonic clock counts from another moment."""
_offset_ns = time.time_ns() - time.monotonic_ns()


def epoch_ns() -> int:
    """Return the time since the epoch in ns, which only grows."""
    return time.monotonic_ns() + _offset_ns


def offset_ns() -> int:
    """Return what gives the time since the epoch when it is added to the monotonic clock, in ns."""
    return _offset_ns


def from_system(time_ns: int) -> int:
    """Return a time of the system's own clock, as it is set now, on this one."""
    return time_ns - time.time_ns() + epoch_ns()


def kept_clock() -> dict[str, Any]:
    """Return what a run's plan says of the clock, for all processes of the run on this machine."""
    return {"counts_from": _counts_from(), "offset_ns": _offset_ns, "host": os.uname().nodename}


def share_clock(kept: object) -> None:
    """Take the clock of a run's plan, if it was kept since this machine was started; else keep the own one."""
    global _offset_ns
    if isinstance(kept, dict) and isinstance(kept.get("offset_ns"), int):
        since = _counts_from()
        if since and kept.get("counts_from") == since:
            _offset_ns = kept["offset_ns"]


def kept_elsewhere(kept: object) -> str:
    """Return the name of the machine on which a run was started; empty where that is this one, or is not known."""
    if not isinstance(kept, dict):
        return ""
    since, host = _counts_from(), kept.get("host")
    away = bool(since) and kept.get("counts_from") not in ("", since)
    return host if away and isinstance(host, str) and host != os.uname().nodename else ""


def _counts_from() -> str:
    """Name the moment from which the monotonic clock counts; empty where the system does not tell it."""
    try:
        with open(_BOOT_FILE, encoding="ascii") as file:
            boot = file.read().strip()
    except (OSError, ValueError):
        return ""
    try:
        return f"{boot} {os.readlink(_NAMESPACE_LINK)}"
    except OSError:
        return boot
