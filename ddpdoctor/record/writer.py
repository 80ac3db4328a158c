"""Writes events and ring files from inside a training process; stdlib only, never raises into the training."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import struct
import threading
import time
import zlib
from array import array
from collections import deque
from json import dumps
from os import pread, pwrite, write
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
        path = os.path.join(self._run_directory, layout.EVENTS_FILE.format(os.getpid()))
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
        name = layout.INDICES_FILE.format(os.getpid(), number)
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


# Writes rings from inside a training process; stdlib only, never raises into the training.
#
# In a live run the training's own threads put rows into memory and the heartbeat's thread takes them to the file; only
# the beginning of a row that the process may not survive is written at once, as is every row of a rehearsal.


class Ring:
    """One file of numbered rows; ``OSError`` where it cannot be made."""

    def __init__(self, path: str, kind: layout.RingKind) -> None:
        self._row = layout.numbers(1 + len(kind.fields))
        self._row_bytes = self._row.size + layout.CHECKSUM_BYTES
        self._rows = kind.rows
        self._heartbeat_numbers = layout.numbers(len(kind.heartbeat_fields))
        self._waiting: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=kind.rows)
        self.next = 0
        """Number of the next row."""
        self._head = layout.IDENTITY.pack(
            kind.magic, layout.VERSION, self._row_bytes, kind.rows, os.getpid(), epoch_ns()
        )
        self.moved_bytes = 0
        """Bytes that were read from and written to the file."""
        self.begun_bytes = 0
        """The same for rows that were written at once, counted apart because another thread does it."""
        self.lost = 0
        """Rows that could not be written."""
        self._written = 0
        """Number of the first row that was not written yet."""
        self._descriptor = private_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        size = layout.HEAD_BYTES + self._rows * self._row_bytes
        try:
            if fits(size):
                os.posix_fallocate(self._descriptor, 0, size)  # The rows have room when the disk is full later.
        except (OSError, AttributeError):
            pass
        self.write_head()

    def put(self, fields: tuple[int, ...]) -> None:
        """Have the next row written; touches no file."""
        if len(self._waiting) == self._rows:
            self.lost += 1
        self._waiting.append((self.next, fields))
        self.next += 1

    def flush(self, unfinished: tuple[int, tuple[int, ...]] | None = None) -> None:
        """Write what waits, after a row that is not finished and may be among what waits; for one thread at a time."""
        if unfinished is not None:
            self.moved_bytes += self._put_down(unfinished[0], self._packed(*unfinished))
        first = 0
        rows: list[bytes] = []
        while self._waiting:
            number, fields = self._waiting.popleft()
            # Rows that lie side by side are written at once: each write may cost the training thread a turn.
            if rows and (number != first + len(rows) or number % self._rows == 0):
                self.moved_bytes += self._put_down(first, b"".join(rows), len(rows))
                rows = []
            if not rows:
                first = number
            rows.append(self._packed(number, fields))
        if rows:
            self.moved_bytes += self._put_down(first, b"".join(rows), len(rows))

    def begin(self, fields: tuple[int, ...]) -> None:
        """Write the next row at once, unfinished: what it stands for may end the process."""
        self.write(self.next, fields)

    def write(self, number: int, fields: tuple[int, ...]) -> None:
        """Write one row at once."""
        self.begun_bytes += self._put_down(number, self._packed(number, fields))

    def _packed(self, number: int, fields: tuple[int, ...]) -> bytes:
        """Return a row as it lies in the file; zeros, which no reader takes for a row, where a number is too large."""
        try:
            row = self._row.pack(number, *fields)
        except struct.error:
            self.lost += 1
            return bytes(self._row_bytes)
        return row + zlib.crc32(row).to_bytes(layout.CHECKSUM_BYTES, "little")

    def _put_down(self, first: int, content: bytes, rows: int = 1) -> int:
        """Write rows that lie side by side; how many bytes that were."""
        if self._written < first + rows:
            self._written = first + rows
        offset = layout.HEAD_BYTES + first % self._rows * self._row_bytes
        try:
            written = pwrite(self._descriptor, content, offset) if fits(offset + len(content)) else 0
        except (OSError, ValueError):
            written = 0
        if written != len(content):
            self.lost += rows - written // self._row_bytes
        return written

    @property
    def heartbeat_bytes(self) -> int:
        """How many bytes the writing of a heartbeat moves."""
        return layout.HEARTBEAT_OFFSET + self._heartbeat_numbers.size + layout.CHECKSUM_BYTES

    def write_head(self, heartbeat: tuple[int, ...] | None = None) -> None:
        """Write the identity, and the newest heartbeat where there is one."""
        head = self._head.ljust(layout.NEXT_OFFSET, b"\0") + layout.NEXT.pack(self._written)
        head = head.ljust(layout.HEARTBEAT_OFFSET, b"\0")
        try:
            if heartbeat is not None:
                packed = self._heartbeat_numbers.pack(*heartbeat)
                head += packed + zlib.crc32(packed).to_bytes(layout.CHECKSUM_BYTES, "little")
            if not fits(len(head)):
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            self.moved_bytes += pwrite(self._descriptor, head, 0)
        except (OSError, struct.error):
            self.lost += 1

    def requested(self) -> int:
        """Number of the newest request of a reader; 0 when there is none."""
        try:
            content = pread(self._descriptor, layout.COMMAND.size, layout.COMMAND_OFFSET)
        except OSError:
            return 0
        self.moved_bytes += len(content)
        return int(layout.COMMAND.unpack(content)[0]) if len(content) == layout.COMMAND.size else 0

    def close(self) -> None:
        """Let go of the file without writing: in a forked child it is the parent's."""
        self._waiting.clear()
        try:
            os.close(self._descriptor)
        except OSError:
            pass


class CollectiveRing:
    """The collectives of a rank in a rehearsal; ``OSError`` where the file cannot be made."""

    def __init__(self, run_directory: str) -> None:
        self._ring = Ring(os.path.join(run_directory, layout.COLLECTIVES_FILE.format(os.getpid())), layout.COLLECTIVES)
        self._incomplete: dict[int, tuple[int, ...]] = {}
        self._lock = threading.Lock()
        self._beat: tuple[int, ...] = (0, 0, 0, -1, 0, 0, 0, 0, 0, 0)
        self._lost = 0
        self._polling = (0, 0)

    @property
    def count(self) -> int:
        """Rows ever written."""
        return self._ring.next

    def append(self, *fields: int) -> int:
        """Log a collective that is about to start, which may end the process; its index.

        ``fields`` are group, sequence, signature, site, step and forward_site.
        """
        with self._lock:
            index, row = self._ring.next, (*fields, epoch_ns(), 0)
            self._ring.begin(row)
            self._ring.next = index + 1
            self._incomplete[index] = row
        return index

    def complete(self, index: int) -> None:
        """Note that the collective has ended."""
        with self._lock:
            row = self._incomplete.pop(index, None)
            if row is not None and index + layout.COLLECTIVE_ROWS > self._ring.next:
                self._ring.write(index, (*row[:-1], epoch_ns()))

    def beat(self, *beat: int) -> None:
        """Write a heartbeat: the fields of ``layout.COLLECTIVES`` from ``main_cpu_ns`` to ``sleeps_until_ns``."""
        self._beat = (epoch_ns(), *beat)
        self._write_head()

    def note_lost(self, events: int) -> None:
        """Say how many events could not be written: this place was reserved while there was room."""
        self._lost = events
        self._write_head()

    def note_polling(self, since_ns: int, asked_ns: int) -> None:
        """Say since when a file has been asked for for nothing, and when it was last; zeros when it is over."""
        if (since_ns, asked_ns) != self._polling:
            self._polling = since_ns, asked_ns
            self._write_head()

    def requested(self) -> int:
        """Number of the newest request for stacks; 0 when there is none."""
        return self._ring.requested()

    def _write_head(self) -> None:
        with self._lock:
            own_bytes = self._ring.moved_bytes + self._ring.begun_bytes + self._ring.heartbeat_bytes
            self._ring.write_head((*self._beat, self._lost + self._ring.lost, *self._polling, own_bytes))
