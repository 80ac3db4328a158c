"""What the ranks of one rehearsal made, and in which state they left it: a log in the run directory that they share.

A record is one line: a CRC-32 in eight hexadecimal digits and a JSON list. What is about to be made is recorded, in one
append, *before* it is made, so that a file which a rank made always has its record; its state is recorded again when it
was opened, while it is written, and before it is closed.
"""

from __future__ import annotations

import binascii
import fcntl
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple, Optional

from ...journal import Journal
from ...torch_compat import on_call, replaces

# How checkpoints are loaded: onto which device, and whether the names of the parameters fit.

NOTED = 200
PREFIX = "module."


class Checkpoints:
    """Patches of ``torch.load``, of its look-up of each storage's place, and of ``Module.load_state_dict``."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        self._journal = journal
        self._torch = torch
        self._noted = 0
        self._saved_on: set[str] = set()
        """Where the storages of the load that is going on were saved."""

    def install(self) -> None:
        """Replace the functions in the modules that users and torch take them from."""
        serialization = self._torch.serialization
        on_call(
            self._journal, serialization, "default_restore_location", before=self._restores, harms=("checkpoint_loads",)
        )
        replaces("load", serialization, self._torch)(self._load)
        replaces("load_state_dict", self._torch.nn.Module)(self._load_state)

    def _restores(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        location = arguments[1] if len(arguments) > 1 else options.get("location")
        if isinstance(location, str) and len(self._saved_on) < 16:
            self._saved_on.add(location)

    def _load(self, load: Any, f: Any, map_location: Any = None, *arguments: Any, **options: Any) -> Any:
        self._saved_on.clear()
        failed = True
        try:
            loaded = load(f, map_location, *arguments, **options)
            failed = False
            return loaded
        finally:
            self._journal.guarded(
                self._note_file, f, map_location is not None, failed, sys._getframe(1), harms=("checkpoint_loads",)
            )

    def _note_file(self, file: Any, mapped: bool, failed: bool, frame: Any) -> None:
        path = target_path(file if isinstance(file, (str, bytes, os.PathLike)) else getattr(file, "name", None))
        self._noted += 1
        if path is not None and self._noted <= NOTED:
            self._journal.event(
                "checkpoint_loaded",
                path=path,
                mapped=mapped,
                failed=failed,
                saved_on=[] if mapped else sorted(self._saved_on),
                site=self._journal.site(frame),
            )

    def _load_state(self, load: Any, module: Any, state_dict: Any, *arguments: Any, **options: Any) -> Any:
        note, frame = self._note_names, sys._getframe(1)
        try:
            result = load(module, state_dict, *arguments, **options)
        except RuntimeError:
            self._journal.guarded(note, module, state_dict, True, frame, harms=("state_names",))
            raise
        fits = not getattr(result, "missing_keys", None) or not getattr(result, "unexpected_keys", None)
        self._journal.guarded(note, module, {} if fits else state_dict, False, frame, harms=("state_names",))
        return result

    def _note_names(self, module: Any, given: Any, raised: bool, frame: Any) -> None:
        """Write how many names fit once the wrapper's prefix is put before them or taken away; no name where all do."""
        own = set(module.state_dict()) if given else set()
        names = {str(name) for name in given}
        without = {name[len(PREFIX) :] for name in names - own if name.startswith(PREFIX)}
        too_long, too_short = len(without & own), len({PREFIX + name for name in names - own} & own)
        self._noted += 1
        if self._noted <= NOTED:
            self._journal.event(
                "state_names",
                module_class=type(module).__qualname__,
                names=len(names),
                too_long=too_long,
                too_short=too_short,
                raised=raised,
                site=self._journal.site(frame),
            )


# Files that the job certainly made itself.

CLOCK_SLACK_NS = 50_000_000
"""File systems stamp files with a clock that lags by up to one kernel tick, 10 ms at most."""


class Identity(NamedTuple):
    """One state of one file or directory."""

    device: int
    inode: int
    size: int
    """Bytes."""
    mtime_ns: int
    """When the content changed last, in nanoseconds since the epoch."""
    ctime_ns: int
    """When anything changed last, also names and mode; 0 where we have changed these ourselves since."""

    @property
    def place(self) -> tuple[int, int]:
        """Device and inode: the same for every name of a file."""
        return self.device, self.inode

    def fits(self, status: os.stat_result) -> bool:
        """Return whether a file is in this very state."""
        return (
            self.place == (status.st_dev, status.st_ino)
            and (self.size, self.mtime_ns) == (status.st_size, status.st_mtime_ns)
            and self.ctime_ns in (0, status.st_ctime_ns)
        )


def identity_of(status: os.stat_result) -> Identity:
    """Return the state that a file is in."""
    return Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def decoded(numbers: object) -> Optional[Identity]:
    """Return the state that five numbers describe; None for none; raises ValueError for anything else."""
    if numbers is None:
        return None
    if not isinstance(numbers, list) or len(numbers) != 5 or not all(type(number) is int for number in numbers):
        raise ValueError("no state of a file")
    return Identity(*numbers)


_MOST_STATES = 32
_LAST_STATES = 4
"""What is renamed is in one of the last states that were recorded: while ranks write, a record may be on its way."""
WRITE_NOTED_EVERY_NS = 50_000_000
"""A process that writes on records the state of its file so often."""
_AFTER_A_NOTE_NS = 3 * WRITE_NOTED_EVERY_NS
"""What was written so soon after the last record of a process that was killed was written by it."""


class Made:
    """What the ranks made at one path."""

    def __init__(self, kind: str, time_ns: int) -> None:
        self.kind = kind
        self.time_ns = time_ns
        """The earliest time at which it may have been made."""
        self.identities: list[Identity] = []
        """The newest states that the ranks left, or saw while they wrote; the newest is last."""
        self.settled_ns = 0
        """When its newest state was recorded."""
        self.doubtful = False
        """Another program has written to it while a rank had it open."""
        self._announced: dict[int, int] = {}
        """Processes that were about to make it and have not recorded its state yet, with the time."""
        self._writers: dict[int, int] = {}
        """Processes that have it open for writing, with the time of their last record."""
        self._brought: dict[int, tuple[Identity, ...]] = {}
        """The states of what each process renamed to this path last, which may come long after its record."""

    def announced(self, pid: int, time_ns: int) -> None:
        """Note that a process is about to make it."""
        self._announced[pid] = time_ns
        self.doubtful = False

    def changed(self, kind: str, identity: Optional[Identity], pid: int, time_ns: int) -> None:
        """Apply a record of its state."""
        if kind == "doubtful":
            self.doubtful = True
        elif kind == "relabelled":
            self.identities = [each._replace(ctime_ns=0) for each in self.identities]
            if identity is not None and any(each[:3] == identity[:3] for each in self.identities):
                self.identities.append(identity)
        else:
            self._announced.pop(pid, None)
            if kind == "open":
                self._writers[pid] = time_ns
            else:
                self._writers.pop(pid, None)
            if identity is not None:
                self.settled_ns = time_ns
                self.identities = [*(each for each in self.identities if each != identity), identity][-_MOST_STATES:]

    def renamed(self, replaced: Optional[Made], pid: int) -> Made:
        """Return the same under another name, at which the ranks may have made something before."""
        moved = Made(self.kind, self.time_ns)
        moved.identities = [each._replace(ctime_ns=0) for each in self.identities[-_LAST_STATES:]]
        moved._announced, moved._writers = dict(self._announced), dict(self._writers)
        moved.settled_ns, moved.doubtful = self.settled_ns, self.doubtful
        moved._brought = {pid: tuple(moved.identities)}
        if replaced is not None and replaced.kind == self.kind:
            # Until the rename is done, which comes after its record, the other ranks still find the old file. A rank
            # without a core renames after 8 of the others' renames, whose states (4 each) are all that is kept of 32.
            moved._brought = {**replaced._brought, **moved._brought}
            moved.identities = [*replaced.identities, *moved.identities][-_MOST_STATES:]
        return moved

    def knows(self, status: os.stat_result) -> bool:
        """Return whether a process of the rehearsal recorded this very state."""
        return any(identity.fits(status) for identity in self._states())

    def _states(self) -> Iterator[Identity]:
        yield from self.identities
        for brought in self._brought.values():
            yield from brought

    def has_other_writers(self, pid: int) -> bool:
        """Return whether a process of the rehearsal beside this one has it open for writing, or is about to."""
        return bool((self._writers.keys() | self._announced.keys()) - {pid})

    def is_at_work_or_left(self, status: os.stat_result) -> bool:
        """Return, while ranks run, whether what is there is theirs: as one left it, or being written by one."""
        if self.doubtful or not self.is_of_kind(status):
            return False
        if self._is_left(status) or (self._writers and self._is_same_file(status)):
            return True
        return any(status.st_ctime_ns >= time_ns - CLOCK_SLACK_NS for time_ns in self._announced.values())

    def is_certain(self, status: os.stat_result) -> bool:
        """Return, when no rank runs any more, whether what is there is theirs and was not changed since."""
        if self.doubtful or not self.is_of_kind(status):
            return False
        if self._is_left(status):
            return True
        return self._is_same_file(status) and any(
            status.st_mtime_ns <= time_ns + _AFTER_A_NOTE_NS for time_ns in self._writers.values()
        )

    def may_be_unfinished(self, status: os.stat_result) -> bool:
        """Return whether a rank may have been killed before it recorded in which state it left this."""
        if self.identities and not self._is_same_file(status):
            return False
        return bool(self._announced or self._writers) and status.st_ctime_ns >= self.time_ns - CLOCK_SLACK_NS

    def _is_left(self, status: os.stat_result) -> bool:
        if self.kind == "directory":
            return self._is_same_file(status)
        if self.kind == "name" and stat.S_ISREG(status.st_mode):
            # Only the name is the ranks'; while the content has another one, nothing is lost with it.
            return status.st_nlink > 1 and self._is_same_file(status)
        return self.knows(status)

    def _is_same_file(self, status: os.stat_result) -> bool:
        return any(identity.place == (status.st_dev, status.st_ino) for identity in self._states())

    def is_of_kind(self, status: os.stat_result) -> bool:
        """Return whether there is now what was to be made."""
        mode = status.st_mode
        if self.kind == "directory":
            return stat.S_ISDIR(mode)
        if self.kind == "socket":
            return stat.S_ISSOCK(mode)
        if self.kind == "pipe":
            return stat.S_ISFIFO(mode)
        if self.kind == "name":
            return stat.S_ISLNK(mode) or stat.S_ISREG(mode)
        return stat.S_ISREG(mode)


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
            self._rename(old, new, record.pid)
        else:
            self.entries[new] = Made(record.kind, record.time_ns)
            self.entries[new].announced(record.pid, record.time_ns)
        inside = old.rstrip(os.sep) + os.sep
        for path in [path for path in self.entries if path.startswith(inside)]:
            self._rename(path, os.path.join(new, path[len(inside) :]), record.pid)

    def _rename(self, old: str, new: str, pid: int) -> None:
        moved = self.entries[old].renamed(self.entries.get(new), pid)
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


# From what a script hands to the operating system to the path of the file that it means.


class UnresolvablePath(Exception):
    """The path is relative to a directory descriptor with a path that the system does not show."""


def target_path(path: object, dir_fd: object = None) -> str | None:
    """Resolve the file that opening ``path`` reaches, through symbolic links; None when it is no path."""
    named = _absolute(path, dir_fd)
    return os.path.realpath(named) if named is not None else None


def name_path(path: object, dir_fd: object = None) -> str | None:
    """Resolve the directory entry that removing or renaming ``path`` touches; None when it is no path."""
    named = _absolute(path, dir_fd)
    if named is None:
        return None
    head, tail = os.path.split(named.rstrip(os.sep) or os.sep)
    if tail in ("", ".", ".."):
        return os.path.realpath(named)
    return os.path.join(os.path.realpath(head), tail)


def described_path(path: object) -> object:
    """Return what a descriptor is open on, where the system shows it; anything else as it is."""
    if not isinstance(path, int) or isinstance(path, bool):
        return path
    try:
        return os.readlink(f"/proc/self/fd/{path}")
    except OSError:
        return path


def _absolute(path: object, dir_fd: object) -> str | None:
    if not isinstance(path, (str, bytes, os.PathLike)):
        return None
    try:
        text = os.fsdecode(path)
    except (TypeError, ValueError):
        return None
    if not text or "\0" in text:
        return None
    if os.path.isabs(text):
        return text
    if isinstance(dir_fd, int) and dir_fd >= 0:
        return os.path.join(_directory_of(dir_fd), text)
    try:
        return os.path.join(os.getcwd(), text)
    except OSError:
        return None


def _directory_of(descriptor: int) -> str:
    try:
        if hasattr(fcntl, "F_GETPATH"):
            path = fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024))
            directory = os.fsdecode(path.rstrip(b"\0"))
        else:
            directory = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        directory = ""
    if not os.path.isabs(directory) or not os.path.isdir(directory):
        raise UnresolvablePath
    return directory


def status_of_target(path: str) -> os.stat_result | None:
    """Stat what ``path`` reaches; None when there is nothing or it cannot be looked at."""
    try:
        return os.stat(path)
    except (OSError, ValueError):
        return None


def status_of_name(path: str) -> os.stat_result | None:
    """Stat the entry ``path`` itself; None when there is nothing or it cannot be looked at."""
    try:
        return os.lstat(path)
    except (OSError, ValueError):
        return None


def is_directory(status: os.stat_result) -> bool:
    """Return whether a stat result is a directory's."""
    return stat.S_ISDIR(status.st_mode)


def is_regular(status: os.stat_result) -> bool:
    """Return whether a stat result is a regular file's: no device, terminal, pipe or socket."""
    return stat.S_ISREG(status.st_mode)


def is_inside(path: str, directory: str) -> bool:
    """Return whether ``path`` is ``directory`` or is in it; both are resolved."""
    return path == directory or path.startswith(directory.rstrip(os.sep) + os.sep)


def shown(path: str) -> str:
    """Shorten a path to one relative to the working directory where it lies in it."""
    try:
        directory = os.path.realpath(os.getcwd())
    except OSError:
        return path
    if path != directory and is_inside(path, directory):
        return os.path.relpath(path, directory)
    return path
