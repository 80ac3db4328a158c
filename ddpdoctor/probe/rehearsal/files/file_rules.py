"""The no-touch rule: what a rank may do to which file, event by event.

A file that existed before the rehearsal is never changed, replaced or deleted; what the ranks made is theirs.
Left alone: the run directory, devices, terminals, pipes and sockets opened for writing, ``/proc``, an empty ``*.lock``
file that is opened to lock it, bytecode of installed packages, and what the operating system will refuse by itself.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import unquote

from .created_log import (
    LOG_NAME,
    OVERLAY_LOG_NAME,
    CreatedFiles,
    Made,
    UnresolvablePath,
    described_path,
    identity_of,
    is_directory,
    is_inside,
    is_regular,
    name_path,
    shown,
    status_of_name,
    status_of_target,
    target_path,
)
from .open_files import OpenFiles

_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_TRUNC
_BYTECODE = re.compile(r"\.pyc(\.\d+)?$")
_INSTALLED = ("/site-packages/", "/dist-packages/")
_STANDARD_LIBRARY = os.path.realpath(os.path.dirname(os.__file__))
_SQLITE_SIDECARS = ("-journal", "-wal", "-shm")
_NOT_OURS = "which the rehearsal did not create"


class Refusal(NamedTuple):
    """An operation that must not happen."""

    action: str
    """``write``, ``save``, ``remove`` or ``rename``."""
    path: str
    sentence: str
    """A clause that goes on from the user's line: ``would delete ckpt_0.pt, which …``."""


class Refused(Exception):
    """Raised by a rule whose path cannot be determined, with its refusal."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.sentence)
        self.refusal = refusal


class BytecodeHeldBack(PermissionError):
    """The refusal of bytecode beside the user's modules; Python's import system goes on without it."""

    def __init__(self) -> None:
        super().__init__("no bytecode is written during a rehearsal")


class FileRules:
    """Rules for operations on files, the log of created files, and reports of what happens to which file.

    Every method that is named after an operation takes the arguments of Python's audit event of that name and returns a
    refusal, or None when the operation may go on.
    """

    def __init__(
        self,
        run_directory: str,
        allow_writes: bool,
        report: Callable[[str, str, bool], None],
        *,
        in_overlay: bool = False,
    ) -> None:
        self._run_directory = os.path.realpath(run_directory)
        self._allow_writes = allow_writes
        self._report = report
        name = OVERLAY_LOG_NAME if in_overlay else LOG_NAME
        self._created = CreatedFiles(self._run_directory, name=name)
        self.open_files = OpenFiles(self._created)

    def opened(self, path: object, flags: object, dir_fd: object = None) -> Refusal | None:
        """Judge ``open`` and ``os.open``; ``flags`` are those of the system call."""
        if not isinstance(flags, int) or not flags & (_CHANGES | os.O_CREAT):
            return None
        target = self._resolve(target_path, "write", path, dir_fd)
        if target is None:
            return None
        changes = bool(flags & _CHANGES) and not flags & os.O_EXCL
        return self.written(target, "write", creates=bool(flags & os.O_CREAT), changes=changes)

    def saved(self, path: object) -> Refusal | None:
        """Judge a library that is about to create or overwrite ``path`` from C++."""
        target = target_path(path)
        return None if target is None else self.written(target, "save", creates=True, changes=True)

    def written_on(self, path: object) -> None:
        """Expect a library to write to ``path``, as it may, now and then until the process ends."""
        target = target_path(path)
        if target is not None and self._created.entry(target) is not None:
            self.open_files.expect(target, for_good=True)

    def written(self, target: str, action: str, *, creates: bool, changes: bool) -> Refusal | None:
        """Judge a change of the content of a resolved path, or its creation."""
        if self._is_exempt(target):
            return None
        status = status_of_target(target)
        if status is None:
            if creates and os.path.isdir(os.path.dirname(target)):
                self._announce("file", target)
                self._report("create" if action == "write" else action, target, False)
            return None
        if not changes or not is_regular(status):
            return None
        made = self._created.maker(target, status)
        if made is not None and made.kind != "name":
            self._created.note("open", target, identity=identity_of(status))
            if creates:  # Another rank may remove it before it is opened.
                self._created.note(made.kind, target)
            self.open_files.expect(target)
            self._report(action, target, False)
            return None
        if target.endswith(".lock") and status.st_size == 0:
            return None
        if self._allow_writes:
            self._created.note("foreign", target)
            self._report(action, target, True)
            return None
        reason = _NOT_OURS if made is None else "a link to a file " + _NOT_OURS
        return Refusal(action, target, f"would write to {shown(target)}, {reason}")

    def truncated(self, path: object) -> Refusal | None:
        """Judge ``os.truncate``; a descriptor was judged when it was opened."""
        target = target_path(path)
        return None if target is None else self.written(target, "write", creates=False, changes=True)

    def attributes_changed(self, path: object, dir_fd: object = None) -> Refusal | None:
        """Judge ``os.chmod``, ``os.chown`` and extended attributes."""
        target = self._resolve(target_path, "write", described_path(path), dir_fd)
        if target is None:
            return None
        if not self._is_foreign(target):
            if self._created.entry(target) is not None:
                self._created.note("relabelled", target)
            return None
        return Refusal("write", target, f"would change the mode or owner of {shown(target)}, {_NOT_OURS}")

    def keeps_times(self, path: object, dir_fd: object = None) -> bool:
        """Return whether the times that ``os.utime`` sets are those of a file that was there before.

        They are left as they are, without a report: a script that touches its marker file has no use for them.
        """
        target = self._resolve(target_path, "write", described_path(path), dir_fd)
        return target is not None and self._is_foreign(target)

    def _is_foreign(self, target: str) -> bool:
        """Return whether a file or directory is there that the ranks did not make and may not change."""
        status = status_of_target(target)
        if status is None or self._allow_writes or self._is_exempt(target):
            return False
        return (is_regular(status) or is_directory(status)) and self._created.maker(target, status) is None

    def times_set(self, path: object, dir_fd: object = None) -> None:
        """Note that ``os.utime`` was called: what the ranks made has other times now."""
        target = self._resolve(target_path, "write", described_path(path), dir_fd)
        status = None if target is None else status_of_target(target)
        if target is not None and status is not None and self._created.entry(target) is not None:
            self._created.note("relabelled", target, identity=identity_of(status))

    def mapped(self, descriptor: object) -> None:
        """Note a file that is mapped into memory, by its descriptor."""
        if isinstance(descriptor, int) and descriptor >= 0:
            self.open_files.mapped(descriptor)

    def temporary_directory_made(self, path: object) -> None:
        """Note ``tempfile.mkdtemp``: only the rank has its name, so that all that is put there is its own."""
        name = name_path(path)
        if name is not None and not self._is_exempt(name):
            self._created.note("private", name)

    def _announce(self, kind: str, path: str) -> None:
        self._created.note(kind, path)
        self.open_files.expect(path)

    def removed(self, path: object, dir_fd: object = None) -> Refusal | None:
        """Judge ``os.remove`` and ``os.unlink``."""
        name, status = self._entry("remove", path, dir_fd)
        if status is None or is_directory(status):
            return None
        return self._taken_away(name, status)

    def directory_removed(self, path: object, dir_fd: object = None) -> Refusal | None:
        """Judge ``os.rmdir``, which takes empty directories only."""
        name, status = self._entry("remove", path, dir_fd)
        if status is None or not is_directory(status) or _has_content(name):
            return None
        return self._taken_away(name, status)

    def tree_removed(self, path: object, dir_fd: object = None) -> Refusal | None:
        """Judge ``shutil.rmtree``: refused as a whole, before its first file; its steps are judged besides."""
        name, status = self._entry("remove", path, dir_fd)
        if status is None or not is_directory(status) or self._allow_writes:
            return None
        if self._is_exempt(name) or self._created.maker(name, status) is not None:
            return None
        return Refusal("remove", name, f"would delete the directory {shown(name)}, {_NOT_OURS}")

    def _taken_away(self, name: str, status: os.stat_result) -> Refusal | None:
        if self._is_exempt(name):
            return None
        if self._created.maker(name, status) is not None:
            if status.st_nlink > 1 and is_regular(status):
                self._created.note("relabelled", name)  # Its other names see another time of change.
            self._report("remove", name, False)
            return None
        if not self._allow_writes:
            return Refusal("remove", name, f"would delete {shown(name)}, {_NOT_OURS}")
        self._created.note("foreign", name)
        self._report("remove", name, True)
        return None

    def renamed(self, source: object, target: object, source_fd: object, target_fd: object) -> Refusal | None:
        """Judge ``os.rename`` and ``os.replace``."""
        (old, status), new = (
            self._entry("rename", source, source_fd),
            self._resolve(name_path, "rename", target, target_fd),
        )
        if status is None or new is None or (self._is_exempt(old) and self._is_exempt(new)):
            return None
        made = Made(_kind_of(status), 0) if self._is_exempt(old) else self._created.maker(old, status)
        there = status_of_name(new)
        replaces = there is not None and not self._is_exempt(new) and self._created.maker(new, there) is None
        if not self._allow_writes:
            if made is None:
                return Refusal("rename", old, f"would rename {shown(old)}, {_NOT_OURS}")
            if replaces:
                return Refusal("rename", new, f"would replace {shown(new)}, {_NOT_OURS}")
            stranger = self._stranger_in(old) if made.kind == "directory" else None
            if stranger is not None:
                return Refusal("rename", stranger, f"would move {shown(stranger)}, {_NOT_OURS}")
        self._note_rename(old, new, made, status, replaces=replaces)
        self._report("rename", new, replaces)
        return None

    def _stranger_in(self, directory: str) -> str | None:
        """Return something below a directory of the ranks' that they did not make."""
        for root, folders, files in os.walk(directory):
            for name in (*folders, *files):
                path = os.path.join(root, name)
                status = status_of_name(path)
                if status is not None and self._created.maker(path, status) is None:
                    return path
        return None

    def _note_rename(self, old: str, new: str, made: Made | None, status: os.stat_result, *, replaces: bool) -> None:
        if made is None:
            self._created.note("foreign", old)
            self._created.note("foreign", new, moved_from=old)
        elif replaces:
            self._created.note("foreign", new)
        elif not self._is_exempt(new):
            if self._created.entry(old) is None:
                self._created.note(made.kind, new)
                self._created.note("open", new, identity=identity_of(status)._replace(ctime_ns=0))
            else:
                self._created.note(made.kind, new, moved_from=old)
            self.open_files.expect(new)

    def linked(self, source: object, target: object, source_fd: object, target_fd: object) -> Refusal | None:
        """Judge ``os.link``: the new name is the ranks', its content only if the old one's is."""
        old, status = self._entry("write", source, source_fd)
        if status is None:
            return None
        made = self._created.maker(old, status)
        if made is not None:
            self._created.note("relabelled", old)
        # ``/proc/self/fd/N`` of a file without a name (``O_TMPFILE``), which only the rank can have made.
        nameless = old.startswith("/proc/") and not os.stat(old).st_nlink
        return self._new_name(target, target_fd, made.kind if made is not None else "file" if nameless else "name")

    def symlinked(self, target: object, dir_fd: object) -> Refusal | None:
        """Judge ``os.symlink``."""
        return self._new_name(target, dir_fd, "name")

    def directory_made(self, path: object, dir_fd: object) -> Refusal | None:
        """Judge ``os.mkdir``."""
        return self._new_name(path, dir_fd, "directory", "mkdir")

    def _new_name(self, path: object, dir_fd: object, kind: str, action: str = "create") -> Refusal | None:
        name = self._resolve(name_path, "write", path, dir_fd)
        if name is not None and not self._is_exempt(name) and self._is_free(name):
            self._announce(kind, name)
            self._report(action, name, False)
        return None

    def pipe_made(self, path: object, dir_fd: object) -> Refusal | None:
        """Judge ``os.mkfifo`` and ``os.mknod``; others than pipes are files, or need rights that few scripts have."""
        return self._new_name(path, dir_fd, "pipe")

    def socket_bound(self, address: object) -> Refusal | None:
        """Judge ``socket.bind``, which makes a file of a Unix socket; a path that is taken makes it fail by itself.

        It is not reported: such sockets are made by libraries, as by a loader's worker that hands on tensors, and stay
        behind when the process is killed.
        """
        name = name_path(address)
        if name is not None and not self._is_exempt(name) and self._is_free(name):
            self._announce("socket", name)
        return None

    def database_connected(self, database: object) -> Refusal | None:
        """Judge ``sqlite3.connect``, which writes from C; a database that was there may only be opened read-only."""
        location = _database_path(database)
        target = None if location is None else target_path(location)
        if target is None:
            return None
        if status_of_target(target) is None and self._is_free(target):
            for suffix in _SQLITE_SIDECARS:
                if self._is_free(target + suffix):
                    self._announce("file", target + suffix)
        return self.written(target, "write", creates=True, changes=True)

    def database_attached(self, database: object) -> Refusal | None:
        """Judge a database that is attached to a connection; None is a path that sqlite does not give beforehand."""
        if database is not None:
            return self.database_connected(database)
        return self._unknown("attach a database whose path is not known beforehand")

    def called_from_c(self, name: object) -> Refusal | None:
        """Judge a function of the C library that changes files and is about to be called through ``ctypes``."""
        return self._unknown(f"call {name}() of the C library, which cannot be observed")

    def _unknown(self, action: str) -> Refusal | None:
        return None if self._allow_writes else Refusal("write", "", f"would {action}")

    def _entry(self, action: str, path: object, dir_fd: object) -> tuple[str, os.stat_result | None]:
        """Return the directory entry that a path names, and its status; None where there is nothing."""
        name = self._resolve(name_path, action, path, dir_fd)
        return name or "", None if name is None else status_of_name(name)

    def _resolve(
        self, resolve: Callable[[object, object], str | None], action: str, path: object, dir_fd: object
    ) -> str | None:
        try:
            return resolve(path, dir_fd)
        except UnresolvablePath as error:
            sentence = f"would {action} {path!s} in a directory that cannot be determined"
            raise Refused(Refusal(action, str(path), sentence)) from error

    @staticmethod
    def _is_free(name: str) -> bool:
        return status_of_name(name) is None and os.path.isdir(os.path.dirname(name))

    def _is_exempt(self, path: str) -> bool:
        if is_inside(path, self._run_directory) or path.startswith("/proc/"):
            return True
        if sys.pycache_prefix and is_inside(path, os.path.realpath(sys.pycache_prefix)):
            return True
        if not _is_bytecode(path):
            return False
        if is_inside(path, _STANDARD_LIBRARY) or any(part in path for part in _INSTALLED):
            return True
        if status_of_name(path) is None:
            raise BytecodeHeldBack
        return False


def _is_bytecode(path: str) -> bool:
    head, tail = os.path.split(path)
    return tail == "__pycache__" or (os.path.basename(head) == "__pycache__" and bool(_BYTECODE.search(tail)))


def _kind_of(status: os.stat_result) -> str:
    return "directory" if is_directory(status) else "file" if is_regular(status) else "name"


def _has_content(directory: str) -> bool:
    try:
        with os.scandir(directory) as entries:
            return any(True for _ in entries)
    except OSError:
        return False


def _database_path(database: object) -> object:
    """Return the file behind a database's name; None when it is in memory or is opened read-only."""
    if not isinstance(database, (str, bytes, os.PathLike)):
        return None
    text = os.fsdecode(database)
    if text in ("", ":memory:"):
        return None
    if not text.startswith("file:"):
        return text
    location, _, query = text[len("file:") :].partition("?")
    options = query.partition("#")[0].split("&")
    if location == ":memory:" or {"mode=ro", "mode=memory", "immutable=1"} & set(options):
        return None
    return unquote(re.sub(r"^//[^/]*(?=/)", "", location)) or None
