"""What this process writes until it is closed, so that its last state is known, and no other is taken for it.

A file object of Python is followed write by write: before each one the file must be as the one before left it. What
writes by itself (a descriptor, a mapping, a library in C) is looked at when it is done, or soon after.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Optional

from .created_log import WRITE_NOTED_EVERY_NS, CreatedFiles, Identity, identity_of, status_of_name

# Replacements of functions of `os` that have no audit event in Python, or one that lacks something.

Done = Callable[[], None]
"""Called when a function has done its work."""


def take_place(name: str, function: Any) -> None:
    """Put a function in the place of ``os``'s own of that name.

    Also where pickle looks for it: scripts hand ``os.remove`` and the like to processes of a pool.
    """
    original = getattr(os, name)
    for supported in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if original in supported:
            supported.add(function)
    for owner in (os, sys.modules[os.name]):
        setattr(owner, name, function)


def wrap_os_open(judge: Callable[[object, int, object], None], quiet: Callable[[Callable[[], int]], int]) -> None:
    """Guard ``os.open`` where it is given a ``dir_fd``, which its audit event leaves out.

    ``judge`` takes path, flags and descriptor; ``quiet`` runs the call without its audit event being judged again.
    """
    original = os.open

    @functools.wraps(original)
    def open_at(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is None:
            return original(path, flags, mode)
        judge(path, flags, dir_fd)
        return quiet(lambda: original(path, flags, mode, dir_fd=dir_fd))

    take_place("open", open_at)


def wrap_makers(done: Done) -> None:
    """Call ``done`` when something was made, moved or linked by ``os``, whose audit events come before."""
    for name in ("mkdir", "symlink", "link", "rename", "replace", "truncate"):
        take_place(name, _followed(getattr(os, name), done))


def share_directories(since_ns: int) -> None:
    """Let ``os.mkdir`` pass where another rank has made the directory since the job began (ns of the epoch).

    A process that makes the same directory twice fails as it always does.
    """
    original = os.mkdir
    own: set[Any] = set()

    @functools.wraps(original)
    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        place = os.path.realpath(path)
        try:
            original(path, mode, dir_fd=dir_fd)
        except FileExistsError:
            if dir_fd is not None or place in own or not _is_made_since(place, since_ns):
                raise
        own.add(place)

    take_place("mkdir", mkdir)


def _is_made_since(place: Any, since_ns: int) -> bool:
    try:
        found = os.lstat(place)
    except OSError:
        return False
    # Linux does not tell Python when a directory was made. One that is older seldom changes while a job starts, and
    # where it does, a try that goes on shows more than one that ends.
    return stat.S_ISDIR(found.st_mode) and found.st_ctime_ns >= since_ns


def wrap_pipe_makers(report: Callable[[object, object], None], done: Done) -> None:
    """Report ``os.mkfifo`` and ``os.mknod``, which have no audit events; ``report`` takes path and ``dir_fd``."""
    for name in ("mkfifo", "mknod"):
        if hasattr(os, name):
            take_place(name, _reported(_followed(getattr(os, name), done), report))


def _reported(original: Any, report: Callable[[object, object], None]) -> Any:
    @functools.wraps(original)
    def call(path: Any, *arguments: Any, dir_fd: int | None = None, **options: Any) -> Any:
        report(path, dir_fd)
        return original(path, *arguments, dir_fd=dir_fd, **options)

    return call


def _followed(original: Any, done: Done) -> Any:
    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        done()
        return result

    return call


def wrap_os_utime(keeps_times: Callable[[object, object], bool], then: Callable[[object, object], None]) -> None:
    """Make ``os.utime`` do nothing to a file whose times must stay; both functions take path and ``dir_fd``."""
    original = os.utime

    @functools.wraps(original)
    def utime(path: Any, times: Any = None, *arguments: Any, dir_fd: int | None = None, **options: Any) -> None:
        if keeps_times(path, dir_fd):
            return
        original(path, times, *arguments, dir_fd=dir_fd, **options)
        then(path, dir_fd)

    take_place("utime", utime)


_ACCESS_MODE = os.O_WRONLY | os.O_RDWR
_END_WAITS_S = 1.0
"""At its end a process waits so long for another thread that settles."""
_LOOKS = 100
"""At a file that changes from look to look; the ranks of a rehearsal are done with a small file after one or two."""
_COMES_WITHIN_S = 1.0
"""What is about to be made is there after so long, or was not made."""


class Written:
    """What a file object of this process writes to one file."""

    def __init__(self, files: OpenFiles, created: CreatedFiles, path: str, identity: Identity) -> None:
        self._files = files
        self._created = created
        self._path = path
        self._last: Optional[Identity] = identity
        """As our last write left it; None once something writes to it that we do not see."""
        self._noted_ns = 0
        self._noted_by = 0

    def unseen(self) -> None:
        """Note that the descriptor was taken, and may be written through."""
        self._last = None

    def before(self, descriptor: int) -> os.stat_result:
        """Return the file's state before we write or close it: since our last write no other program may have written.

        Another rank may have been writing when we looked at the file, and have closed it when we look at the log: a
        state without a record counts only if it is still there after that.
        """
        status = os.fstat(descriptor)
        for _ in range(_LOOKS):
            if self._last is None or not status.st_nlink or identity_of(status)[:4] == self._last[:4]:
                return status
            entry = self._created.entry(self._path)
            if entry is None or entry.has_other_writers(os.getpid()):
                self._last = None
                return status
            seen, status = status, os.fstat(descriptor)
            if entry.knows(seen):
                return status
            if identity_of(seen) == identity_of(status):
                break
        self._created.note("doubtful", self._path)
        return status

    def after(self, status: os.stat_result) -> None:
        """Note that we have written."""
        if self._last is not None:
            self._last = identity_of(status)
        if time.time_ns() - self._noted_ns >= WRITE_NOTED_EVERY_NS or self._noted_by != os.getpid():
            self.note_open(status)

    def note_open(self, status: os.stat_result) -> None:
        """Record the state of a file that is being written."""
        self._noted_ns, self._noted_by = time.time_ns(), os.getpid()
        self._created.note("open", self._path, identity=identity_of(status))

    def closing(self, descriptor: int) -> None:
        """Note that the file object is about to be closed."""
        self._files.leave(path_of(descriptor) or self._path, self.before(descriptor))


class OpenFiles:
    """What this process has open for writing, or makes, of the files that the ranks make."""

    def __init__(self, created: CreatedFiles) -> None:
        self._created = created
        self._unsettled: dict[str, float] = {}
        """What this process makes or changes in a way that does not show when it is done; since when."""
        self._descriptors: dict[int, str] = {}
        """What ``os.open`` was called for."""
        self._written_on: set[str] = set()
        """What is written now and then, opened anew each time."""
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._become_child)

    def _become_child(self) -> None:
        self._lock = threading.RLock()
        self._unsettled, self._written_on = {}, set()

    def expect(self, path: str, *, for_good: bool = False) -> None:
        """Expect something of the ranks to be made or changed here; ``for_good``: as long as the process lives."""
        if for_good:
            self._written_on.add(path)
        self._unsettled[path] = time.monotonic()

    def begin(self, descriptor: int) -> Optional[Written]:
        """Return an account of a file object that was opened for writing, where the file is one that the ranks make."""
        path, status = path_of(descriptor), os.fstat(descriptor)
        if path is None or not stat.S_ISREG(status.st_mode) or not self._is_ours(path, status):
            return None
        self._unsettled.pop(path, None)
        written = Written(self, self._created, path, identity_of(status))
        written.note_open(status)
        return written

    def _is_ours(self, path: str, status: os.stat_result) -> bool:
        entry = self._created.entry(path)
        return entry is not None and entry.is_at_work_or_left(status)

    def opened(self, descriptor: int, flags: int) -> None:
        """Note a file that ``os.open`` has opened."""
        self._descriptors.pop(descriptor, None)
        path = path_of(descriptor) if flags & (_ACCESS_MODE | os.O_CREAT) else None
        if path is None:
            return
        status = os.fstat(descriptor)
        if self._is_ours(path, status):
            self._descriptors[descriptor] = path
            self._created.note("open", path, identity=identity_of(status))

    def closing(self, descriptor: int) -> None:
        """Note a descriptor that ``os.close`` is about to close."""
        path = self._descriptors.pop(descriptor, None)
        if path is not None and path_of(descriptor) == path:
            self._unsettled.pop(path, None)
            self.leave(path, os.fstat(descriptor))

    def leave(self, path: str, status: os.stat_result) -> None:
        """Record the state that a file is left in, or goes on from where it is mapped; a removed one is no more."""
        if status.st_nlink:
            self._created.note("open" if path in self._unsettled else "closed", path, identity=identity_of(status))

    def mapped(self, descriptor: int) -> None:
        """Note a file that is mapped: what is written to it is not seen any more, and goes on after it was closed."""
        path = path_of(descriptor)
        if path is not None and self._created.entry(path) is not None:
            self.expect(path)

    def settle(self, *, at_end: bool = False) -> None:
        """Record the state of what is no longer open here; at the end of the process also of what still is."""
        if not self._unsettled and not at_end:
            return
        # This thread may hold the lock of the log, which settling takes: never wait for one with the other.
        if not self._lock.acquire(timeout=_END_WAITS_S if at_end else 0):
            return
        try:
            writable = _writable_files()
            for path in dict.fromkeys([*self._unsettled, *(writable.values() if at_end else ())]):
                self._settle(path, writable, at_end=at_end)
        finally:
            self._lock.release()

    def _settle(self, path: str, writable: Mapping[tuple[int, int], str], *, at_end: bool) -> None:
        entry, status = self._created.entry(path), status_of_name(path)
        if entry is None or status is None:
            # Another thread may just be about to make it.
            if entry is None or at_end or time.monotonic() - self._unsettled.get(path, 0.0) > _COMES_WITHIN_S:
                self._unsettled.pop(path, None)
                self._created.note("closed", path)
            return
        if not entry.is_at_work_or_left(status):
            self._unsettled.pop(path, None)
            return
        if not at_end and path in self._written_on:
            if not entry.knows(status):
                self._created.note("open", path, identity=identity_of(status))
            return
        if not at_end and (status.st_dev, status.st_ino) in writable:
            if not entry.identities:
                self._created.note("open", path, identity=identity_of(status))
            return
        self._unsettled.pop(path, None)
        self._created.note("closed", path, identity=identity_of(status))


def path_of(descriptor: int) -> Optional[str]:
    """Return the path of the file that a descriptor is open on; None where there is none, or the system hides it."""
    try:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return None
    return path if os.path.isabs(path) and not path.endswith(" (deleted)") else None


def _writable_files() -> dict[tuple[int, int], str]:
    """Return the paths that this process can write to, by descriptor or shared mapping: by device, inode."""
    found: dict[tuple[int, int], str] = {}
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return found
    for name in descriptors:
        try:
            status = os.fstat(int(name))
            if stat.S_ISREG(status.st_mode) and _is_writable(name) and (path := path_of(int(name))):
                found[status.st_dev, status.st_ino] = path
        except (OSError, ValueError):
            continue
    for path in _shared_mappings():
        status_or_none = status_of_name(path)
        if status_or_none is not None:
            found[status_or_none.st_dev, status_or_none.st_ino] = path
    return found


def _is_writable(descriptor: str) -> bool:
    with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.startswith("flags:"):
                return bool(int(line.split()[1], 8) & _ACCESS_MODE)
    return False


def _shared_mappings() -> list[str]:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
            shared = [line for line in lines if " rw-s " in line[:60] and "/" in line]
            return [line.split(maxsplit=5)[5].rstrip("\n") for line in shared]
    except (OSError, IndexError):
        return []


# File objects that record what they write, in the place of Python's own, for files that are opened for writing.

_WRITING = frozenset("wax+")
_KNOWN = frozenset("rwaxbt+")


class Followed(io.FileIO):
    """A file that is open for writing, as ``io.FileIO`` is, with an account of what is written to it."""

    _account: Optional[Written] = None
    _quietly: Callable[[Callable[[], Any]], Any]

    def write(self, data: Any, /) -> int:
        """Write, after a test that no other program has written since."""
        return int(self._seen(lambda: io.FileIO.write(self, data)) or 0)

    def truncate(self, size: Optional[int] = None, /) -> int:
        """Change the size."""
        return int(self._seen(lambda: io.FileIO.truncate(self, size)))

    def fileno(self) -> int:
        """Return the descriptor, through which may be written from now on."""
        if self._account is not None:
            self._account.unseen()
        return super().fileno()

    def close(self) -> None:
        """Close the file, in the state in which it is left."""
        account, self._account = self._account, None
        if account is not None and not self.closed:
            self._guarded(lambda: account.closing(io.FileIO.fileno(self)))
        super().close()

    def _seen(self, change: Callable[[], Any]) -> Any:
        account = self._account
        if account is None:
            return change()
        self._guarded(lambda: account.before(io.FileIO.fileno(self)))
        try:
            return change()
        finally:
            self._guarded(lambda: account.after(os.fstat(io.FileIO.fileno(self))))

    def _guarded(self, call: Callable[[], Any]) -> None:
        try:
            self._quietly(call)
        except Exception:
            # What is not recorded stays where it is; the user's file is written regardless.
            return


Followed.__name__ = Followed.__qualname__ = "FileIO"


def follow_io(files: OpenFiles, quietly: Callable[[Callable[[], Any]], Any]) -> None:
    """Take the places of ``open``, ``io.open``, and of ``os.open`` and ``os.close``; ``files`` gives the accounts."""
    original = builtins.open
    followed = type("FileIO", (Followed,), {"_quietly": staticmethod(quietly), "__slots__": ()})

    def open(  # noqa: A001 - takes the place of the builtin
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: Optional[str] = None,
        errors: Optional[str] = None,
        newline: Optional[str] = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """Open a file."""
        plain = not isinstance(mode, str) or _WRITING.isdisjoint(mode) or not _is_valid(mode, buffering)
        if plain or ("b" in mode and (encoding, errors, newline) != (None, None, None)):
            return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = followed(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        try:
            raw._account = _begun(files, raw, quietly)
            return _buffered(raw, mode, buffering, encoding, errors, newline)
        except BaseException:
            raw.close()
            raise

    open.__module__, open.__qualname__ = "_io", "open"
    open.__doc__ = original.__doc__
    for owner in (builtins, io, sys.modules["_io"]):
        if getattr(owner, "open", None) is original:
            setattr(owner, "open", open)  # noqa: B010 - mypy holds a function of a module for final
    _follow_descriptors(files, quietly)


def _begun(files: OpenFiles, raw: Followed, quietly: Callable[[Callable[[], Any]], Any]) -> Optional[Written]:
    try:
        account: Optional[Written] = quietly(lambda: files.begin(io.FileIO.fileno(raw)))
    except Exception:
        return None
    return account


def _is_valid(mode: str, buffering: object) -> bool:
    """Return whether a mode is one that needs no error or warning of Python's own ``open``."""
    letters = set(mode)
    if not letters <= _KNOWN or len(letters) != len(mode) or len(letters & set("rwax")) != 1 or {"b", "t"} <= letters:
        return False
    return isinstance(buffering, int) and (buffering < 0 or buffering > 1 or (buffering == 0) == ("b" in letters))


def _buffered(
    raw: Followed, mode: str, buffering: int, encoding: Optional[str], errors: Optional[str], newline: Optional[str]
) -> Any:
    """Build what Python's own ``open`` builds around a file."""
    lines = buffering == 1 or (buffering < 0 and raw.isatty())
    if buffering == 0:
        return raw
    if buffering < 0 or buffering == 1:
        blksize = int(getattr(raw, "_blksize", 0))
        buffering = blksize if blksize > 1 else io.DEFAULT_BUFFER_SIZE
    buffer = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw, buffering)
    if "b" in mode:
        return buffer
    if encoding is None and hasattr(io, "text_encoding"):
        encoding = io.text_encoding(encoding, 3)
    text = io.TextIOWrapper(buffer, encoding, errors, newline, lines)
    setattr(text, "mode", mode)  # noqa: B010 - as Python's own does, though its stub has it read-only
    return text


def _follow_descriptors(files: OpenFiles, quietly: Callable[[Callable[[], Any]], Any]) -> None:
    opened, closed = os.open, os.close

    def open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: Optional[int] = None) -> int:  # noqa: A001
        """Open a file by a descriptor."""
        descriptor = opened(path, flags, mode, dir_fd=dir_fd)
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            try:
                quietly(lambda: files.opened(descriptor, flags))
            except Exception:
                return descriptor
        return descriptor

    def close(fd: int) -> None:
        """Close a descriptor."""
        try:
            quietly(lambda: files.closing(fd))
        except Exception:
            pass
        closed(fd)

    take_place("open", functools.wraps(opened)(open))
    take_place("close", functools.wraps(closed)(close))
