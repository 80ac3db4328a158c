"""What the ranks of one rehearsal made, and in which state they left it: a log in the run directory that they share.

A record is one line: a CRC-32 in eight hexadecimal digits and a JSON list. What is about to be made is recorded, in one
append, *before* it is made, so that a file which a rank made always has its record; its state is recorded again when it
was opened, while it is written, and before it is closed.
"""

from __future__ import annotations

import binascii
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Optional

from .made import Identity, Made, decoded

LOG_NAME = "created-files.log"
"""Name of the log inside the run directory."""
OVERLAY_LOG_NAME = "files-in-the-overlay.log"
"""Its name where the ranks write to an overlay: the clean-up must not look for those files outside."""

MADE = ("file", "directory", "socket", "pipe", "name")
"""What is about to be made; a ``name`` is a link made by the ranks to content that may not be theirs."""
KINDS = (*MADE, "open", "closed", "relabelled", "doubtful", "private", "foreign")
"""Besides what is made: ``open``, a process of ours has it open for writing, in this state; ``closed``, it left it in
this state; ``relabelled``, its names or mode are changed by us, its content is not; ``doubtful``, another program wrote
to it while a rank had it open; ``private``, a directory with a name that only the rank has; ``foreign``, it was there
before the rehearsal and was changed or taken away by permission: whatever has that name is never cleaned up."""


class Record(NamedTuple):
    """One line of the log."""

    kind: str
    path: str
    """Absolute, without symbolic links in its directories."""
    time_ns: int
    """Nanoseconds since the epoch; what is about to be made did not exist then."""
    moved_from: str = ""
    """The former path of a file or directory that was renamed to ``path``, otherwise empty."""
    identity: Optional[Identity] = None
    """The state of ``open`` and ``closed``; None where there was nothing."""
    pid: int = 0
    """The process that made the record."""


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
        kind, path, time_ns, moved_from, numbers, pid = json.loads(payload)
        identity = decoded(numbers)
    except (ValueError, TypeError):
        return None
    if kind not in KINDS or not isinstance(time_ns, int) or time_ns <= 0 or not isinstance(pid, int):
        return None
    if not _is_plain(path) or (moved_from != "" and not _is_plain(moved_from)):
        return None
    return Record(kind, path, time_ns, moved_from, identity, pid)


def _is_plain(path: object) -> bool:
    return isinstance(path, str) and os.path.isabs(path) and os.path.normpath(path) == path and "\0" not in path


class Replay:
    """The state of the log after some of its records."""

    def __init__(self) -> None:
        self.entries: dict[str, Made] = {}
        self.foreign: set[str] = set()
        self._private: set[str] = set()
        self._names: dict[tuple[int, int], set[str]] = {}
        """The paths by which each file of the ranks was known."""

    def apply(self, record: Record) -> None:
        """Take one more record into account."""
        if record.moved_from:
            self._move(record)
        elif record.kind == "foreign":
            self.foreign.add(record.path)
        elif record.kind == "private":
            self._private.add(record.path)
        elif record.kind in MADE:
            entry = self.entries.get(record.path)
            if entry is None or entry.kind != record.kind:
                entry = self.entries[record.path] = Made(record.kind, record.time_ns)
            entry.announced(record.pid, record.time_ns)
        else:
            self._change(record)

    def _change(self, record: Record) -> None:
        entry = self.entries.get(record.path)
        if entry is None:
            return
        if record.identity is not None:
            self._names.setdefault(record.identity.place, set()).add(record.path)
        gone = record.kind == "closed" and record.identity is None
        for name in {record.path} if gone else self._aliases(record.path, record.identity, entry):
            self.entries[name].changed(record.kind, record.identity, record.pid, record.time_ns)

    def _aliases(self, path: str, identity: Optional[Identity], entry: Made) -> set[str]:
        """Return the path and the other names of the same file; one that had its number before is another file."""
        names = {path}
        known = identity or (entry.identities[-1] if entry.identities else None)
        if known is not None:
            place = known.place
            for name in self._names.get(place, ()):
                other = self.entries.get(name)
                if other is not None and other.identities and other.identities[-1].place == place:
                    names.add(name)
        return names

    def _move(self, record: Record) -> None:
        """Move a file's state to its new name; the old one is kept, for the rename comes after its record."""
        old, new = record.moved_from, record.path
        if record.kind == "foreign":
            self.foreign.add(new)
        elif old in self.entries:
            self._rename(old, new)
        else:
            self.entries[new] = Made(record.kind, record.time_ns)
            self.entries[new].announced(record.pid, record.time_ns)
        inside = old.rstrip(os.sep) + os.sep
        for path in [path for path in self.entries if path.startswith(inside)]:
            self._rename(path, os.path.join(new, path[len(inside) :]))

    def _rename(self, old: str, new: str) -> None:
        moved = self.entries[old].renamed(self.entries.get(new))
        self.entries[new] = moved
        for identity in moved.identities:
            self._names.setdefault(identity.place, set()).add(new)

    def maker(self, path: str, status: os.stat_result) -> Made | None:
        """Return what the ranks made at ``path``, where what is there now is known to be theirs; otherwise None."""
        if path in self.foreign:
            return None
        entry = self.entries.get(path)
        if entry is not None and entry.is_at_work_or_left(status):
            return entry
        if entry is None and self._private and not self._private.isdisjoint(_parents(path)):
            return Made("directory" if stat.S_ISDIR(status.st_mode) else "file", 0)
        return None


def _parents(path: str) -> Iterator[str]:
    parent = os.path.dirname(path)
    while parent != path:
        yield parent
        path, parent = parent, os.path.dirname(parent)


_open, _close = os.open, os.close
"""As they were before they were guarded: the log is no file of the script's."""


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

    def note(self, kind: str, path: str, moved_from: str = "", identity: Optional[Identity] = None) -> None:
        """Append a record."""
        record = Record(kind, path, self._clock(), moved_from, identity, os.getpid())
        with self._lock:
            if not self._append(encode(record)):
                self._replay.apply(record)

    def _append(self, line: bytes) -> bool:
        try:
            log = _open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            return os.write(log, line) == len(line)
        except OSError:
            return False
        finally:
            _close(log)

    def maker(self, path: str, status: os.stat_result) -> Made | None:
        """Return what any rank made at ``path``, where what is there now is known to be theirs; otherwise None."""
        with self._lock:
            self._follow()
            return self._replay.maker(path, status)

    def entry(self, path: str) -> Made | None:
        """Return what the log holds of a path, whatever is there now."""
        with self._lock:
            self._follow()
            return self._replay.entries.get(path)

    def _follow(self) -> None:
        try:
            log = _open(self._path, os.O_RDONLY | os.O_CLOEXEC)
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
            _close(log)


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
