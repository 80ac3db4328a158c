"""Which files the ranks of one rehearsal made: an append-only log in the run directory, shared by all its processes.

A record is one line: a CRC-32 in eight hexadecimal digits and a JSON list ``[kind, path, time_ns, moved_from]``. It is
written in one append *before* the file is made, so whoever finds a file that a rank made finds its record as well.
"""

from __future__ import annotations

import binascii
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

LOG_NAME = "created-files.log"
"""Name of the log inside the run directory."""
OVERLAY_LOG_NAME = "files-in-the-overlay.log"
"""Its name where the ranks write to an overlay: who cleans up must not look for those files outside."""

KINDS = ("file", "directory", "socket", "name", "foreign")
"""``file``, ``directory`` and ``socket`` were made by the ranks. ``name`` is a link made by them to content that may
not be theirs. ``foreign`` was there before the rehearsal and was taken away with leave: whatever has that name is
never cleaned up."""


class Record(NamedTuple):
    """One line of the log."""

    kind: str
    path: str
    """Absolute, without symbolic links in its directories."""
    time_ns: int
    """Nanoseconds since the epoch; the file did not exist then."""
    moved_from: str = ""
    """The former path of a file or directory that was renamed to ``path``, otherwise empty."""


class Created(NamedTuple):
    """What the ranks made under one path."""

    kind: str
    time_ns: int
    """The earliest time at which it may have been made."""


def encode(record: Record) -> bytes:
    """Write a record as a line of the log, line end included."""
    payload = json.dumps(list(record), separators=(",", ":")).encode("ascii")
    return b"%08x %s\n" % (binascii.crc32(payload), payload)


def decode(line: bytes) -> Record | None:
    """Read a line of the log; None when it is damaged in any way."""
    checksum, _, payload = line.rstrip(b"\n").partition(b" ")
    try:
        if int(checksum, 16) != binascii.crc32(payload):
            return None
        kind, path, time_ns, moved_from = json.loads(payload)
    except (ValueError, TypeError):
        return None
    if kind not in KINDS or not isinstance(time_ns, int) or time_ns <= 0:
        return None
    if not _is_plain(path) or (moved_from != "" and not _is_plain(moved_from)):
        return None
    return Record(kind, path, time_ns, moved_from)


def _is_plain(path: object) -> bool:
    return isinstance(path, str) and os.path.isabs(path) and os.path.normpath(path) == path and "\0" not in path


class Replay:
    """The state of the log after some of its records."""

    def __init__(self) -> None:
        self.entries: dict[str, Created] = {}
        self.foreign: set[str] = set()

    def apply(self, record: Record) -> None:
        """Take one more record into account."""
        if record.moved_from:
            self._move_content(record.moved_from, record.path)
        if record.kind == "foreign":
            self.foreign.add(record.path)
            return
        known = self.entries.get(record.path)
        earliest_ns = min(known.time_ns, record.time_ns) if known else record.time_ns
        self.entries[record.path] = Created(record.kind, earliest_ns)

    def _move_content(self, old: str, new: str) -> None:
        inside = old.rstrip(os.sep) + os.sep
        moved = {path: entry for path, entry in self.entries.items() if path.startswith(inside)}
        for path, entry in moved.items():
            self.entries[os.path.join(new, path[len(inside) :])] = entry

    def kind(self, path: str) -> str:
        """The kind that the log gives to ``path`` itself; empty when it has no record."""
        if path in self.foreign:
            return "foreign"
        entry = self.entries.get(path)
        return entry.kind if entry else ""

    def maker(self, path: str) -> Created | None:
        """Say what the ranks made at ``path``; None when it is not known to be theirs.

        What lies in a directory that the ranks made is theirs too, whoever wrote it (a shell child, a C++ library).
        """
        if path in self.foreign:
            return None
        entry = self.entries.get(path)
        if entry is not None:
            return entry
        for parent in _parents(path):
            if parent in self.foreign:
                return None
            above = self.entries.get(parent)
            if above is not None and above.kind == "directory":
                return Created("directory" if os.path.isdir(path) else "file", above.time_ns)
        return None


def _parents(path: str) -> Iterator[str]:
    parent = os.path.dirname(path)
    while parent != path:
        yield parent
        path, parent = parent, os.path.dirname(parent)


class CreatedFiles:
    """One process's view of the log: appends to it, and follows what the other processes append.

    The log is opened for each access: a descriptor that is kept could be closed by the script and then be a file of the
    script's.
    """

    def __init__(self, run_directory: str, clock: Callable[[], int] = time.time_ns, name: str = LOG_NAME) -> None:
        self._path = os.path.join(run_directory, name)
        self._clock = clock
        self._replay = Replay()
        self._read_bytes = 0
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()

    def note(self, kind: str, path: str, time_ns: int = 0, moved_from: str = "") -> None:
        """Record that ``path`` is about to be made; ``time_ns`` is for what was made earlier under another name."""
        with self._lock:
            self._follow()
            if not moved_from and kind == self._replay.kind(path):
                return
            record = Record(kind, path, time_ns or self._clock(), moved_from)
            if not self._append(encode(record)):
                self._replay.apply(record)

    def _append(self, line: bytes) -> bool:
        try:
            log = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            return os.write(log, line) == len(line)
        except OSError:
            return False
        finally:
            os.close(log)

    def maker(self, path: str) -> Created | None:
        """Say what any rank made at ``path``; None when it is not known to be theirs."""
        with self._lock:
            self._follow()
            return self._replay.maker(path)

    def _follow(self) -> None:
        try:
            log = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            while True:
                block = os.pread(log, 1 << 20, self._read_bytes)
                end = block.rfind(b"\n") + 1
                if end == 0:
                    return
                self._read_bytes += end
                for line in block[:end].split(b"\n"):
                    record = decode(line)
                    if record is not None:
                        self._replay.apply(record)
        except OSError:
            pass
        finally:
            os.close(log)


def read_log(run_directory: str) -> Iterator[Record]:
    """Yield the undamaged records of a run directory's log, in order; none when there is no log."""
    try:
        with open(os.path.join(run_directory, LOG_NAME), "rb") as log:
            for line in log:
                record = decode(line)
                if record is not None:
                    yield record
    except OSError:
        return
