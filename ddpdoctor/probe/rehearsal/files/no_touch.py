"""The guard that keeps the ranks of a rehearsal from changing, replacing or deleting files that existed before it.

An audit hook sees what Python itself does to files; wrappers see what torch and safetensors do from C++ and Rust. What
is allowed is decided in ``file_rules``. Not seen: other native writers (HDF5, Arrow, OpenCV), and what children do.
"""

from __future__ import annotations

import atexit
import errno
import functools
import os
import re
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Optional

from ....record import layout
from ...torch_compat import after_import
from .file_rules import BytecodeHeldBack, FileRules, Refusal, Refused
from .open_files import follow_io, take_place, wrap_makers, wrap_os_open, wrap_os_utime, wrap_pipe_makers
from .unseen_writers import (
    LIBC_STARTERS,
    LIBC_WRITERS,
    wrap_readline,
    wrap_safetensors,
    wrap_shared_memory,
    wrap_sqlite,
    wrap_torch,
)

OnRefused = Callable[[str, str, str], object]
"""Called with action, path and sentence instead of a forbidden operation; raises what ends the rank, or ends it."""
OnFile = Callable[[str, str, bool], object]
"""Called with action, path and whether the file existed before the rehearsal, just before an allowed operation."""
OnChild = Callable[[str, bool], object]
"""Called with the command line of a child process, and whether it keeps these rules, just before it starts."""
OfUser = Callable[[], bool]
"""Returns whether the user's own code is at work."""

_RULES = {
    "open": ("opened", (0, 2)),
    "os.remove": ("removed", (0, 1)),
    "os.rmdir": ("directory_removed", (0, 1)),
    "shutil.rmtree": ("tree_removed", (0, 1)),
    "os.rename": ("renamed", (0, 1, 2, 3)),
    "os.link": ("linked", (0, 1, 2, 3)),
    "os.symlink": ("symlinked", (1, 2)),
    "os.mkdir": ("directory_made", (0, 2)),
    "os.chmod": ("attributes_changed", (0, 2)),
    "os.chown": ("attributes_changed", (0, 3)),
    "os.setxattr": ("attributes_changed", (0,)),
    "os.removexattr": ("attributes_changed", (0,)),
    "os.truncate": ("truncated", (0,)),
    "socket.bind": ("socket_bound", (1,)),
    "sqlite3.connect": ("database_connected", (0,)),
}
"""Audit event -> method of ``FileRules`` and the positions of the arguments that it takes."""

_NOTED = {"mmap.__new__": "mapped", "tempfile.mkdtemp": "temporary_directory_made"}
"""Audit event -> method of ``FileRules`` that gets its first argument and refuses nothing."""

_CHILDREN = {"subprocess.Popen": 1, "os.posix_spawn": 1, "os.exec": 1, "os.system": 0}
"""Audit event -> position of the command in its arguments."""

_JUDGED_AGAIN = 5
_JUDGED_AGAIN_AFTER_S = 0.002
_ENVIRONMENTS = {"subprocess.Popen": 3, "os.posix_spawn": 2, "os.exec": 2}
"""Audit event -> position of the environment in its arguments."""

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_ACTIVE: list[_Guard] = []
"""The guard of this process, once it is installed."""


def install(
    run_directory: str,
    allow_writes: bool,
    on_refused: OnRefused,
    on_file: OnFile,
    on_child: OnChild,
    mount_points: Mapping[str, bool] | None = None,
    of_user: OfUser = lambda: True,
) -> None:
    """Guard this process, its threads and the processes that it forks until it ends.

    ``run_directory`` holds the log of created files that all ranks share, and may be written freely. In an overlay,
    where ``mount_points`` names those outside it, everything is reported and nothing refused.
    """
    guard = _Guard(
        run_directory, allow_writes, on_refused, on_file, on_child, of_user, in_overlay=mount_points is not None
    )
    _ACTIVE.append(guard)
    wrap_os_open(guard.judged_by("opened"), guard.quietly)
    wrap_os_utime(guard.keeps_times, functools.partial(guard.note, guard.rules.times_set))
    if mount_points is None:
        _follow_what_is_written(guard)
    else:
        cross_overlays(mount_points, guard.quietly)
    sys.addaudithook(_hook_of(guard))


def _follow_what_is_written(guard: _Guard) -> None:
    """Follow the last state of files that are written for good, and guard the ways that have no audit event."""
    follow_io(guard.rules.open_files, guard.quietly)
    wrap_makers(settle)
    wrap_pipe_makers(guard.judged_by("pipe_made"), settle)
    after_import("_sqlite3", lambda sqlite: wrap_sqlite(sqlite, guard.judged_by("database_attached")))
    after_import("readline", lambda readline: wrap_readline(readline, _judge_saving, settle))
    wrap_shared_memory(guard.judged_by("opened"), guard.judged_by("removed"), settle)
    _settle_at_end()


def settle(*, at_end: bool = False) -> None:
    """Record in which state the files are left that this process makes; a fault costs only the record."""
    if _ACTIVE:
        _ACTIVE[0].note(lambda: _ACTIVE[0].rules.open_files.settle(at_end=at_end))


def _settle_at_end() -> None:
    """Settle when the interpreter ends, and when the process is left by ``os._exit``."""
    leave = os._exit

    def _exit(status: int) -> NoReturn:
        settle(at_end=True)
        leave(status)

    os._exit = _exit
    atexit.register(settle, at_end=True)


def wrap_torch_writers(torch: Any) -> None:
    """Guard torch's and safetensors' own writers once ``torch`` is imported; without ``install`` nothing is guarded."""
    wrap_torch(torch, _judge_saving, _judge_writing_on, settle)
    wrap_safetensors(_judge_saving, settle)


def _judge_writing_on(path: object) -> None:
    _judge_saving(path)
    if _ACTIVE:
        _ACTIVE[0].note(_ACTIVE[0].rules.written_on, path)


def _judge_saving(path: object) -> None:
    if _ACTIVE:
        _ACTIVE[0].judge(_ACTIVE[0].rules.saved, path)


class _Guard:
    """The connection of events to rules, and of rules to the rank's callbacks."""

    def __init__(
        self,
        run_directory: str,
        allow_writes: bool,
        on_refused: OnRefused,
        on_file: OnFile,
        on_child: OnChild,
        of_user: OfUser,
        *,
        in_overlay: bool,
    ) -> None:
        self._in_overlay = in_overlay
        self._on_refused = on_refused
        self._on_file = on_file
        self._on_child = on_child
        self._of_user = of_user
        self._thread = threading.local()
        self.rules = FileRules(run_directory, allow_writes, self._report_file, in_overlay=in_overlay)

    def is_quiet(self) -> bool:
        """Return whether this thread is inside one of our own calls."""
        return getattr(self._thread, "quiet", False)

    def quietly(self, call: Callable[[], Any]) -> Any:
        """Run ``call`` without judging what it does to files in this thread."""
        before = self.is_quiet()
        self._thread.quiet = True
        try:
            return call()
        finally:
            self._thread.quiet = before

    def judge(self, rule: Callable[..., Refusal | None], *arguments: object) -> None:
        """Apply a rule; a refusal, or a rule that fails itself, ends the operation."""
        if self.is_quiet():
            return
        try:
            refusal = rule(*arguments)
            for _ in range(_JUDGED_AGAIN if refusal is not None and not self._in_overlay else 0):
                # Another rank may have been writing the file, or have replaced it, between our looks at file and log.
                time.sleep(_JUDGED_AGAIN_AFTER_S)
                refusal = refusal and rule(*arguments)
        except BytecodeHeldBack:
            raise
        except Refused as refused:
            refusal = refused.refusal
        except Exception as fault:
            if sys.is_finalizing():
                return
            refusal = Refusal("write", "", f"changes a file in a way that cannot be judged ({type(fault).__name__})")
        if refusal is not None and not self._in_overlay:
            self.quietly(lambda: self._on_refused(*refusal))
            raise PermissionError(f"{refusal.sentence}: refused in a rehearsal")

    def judged_by(self, rule: str) -> Callable[..., None]:
        """Return what applies the rule of a name to its arguments."""
        return functools.partial(self.judge, getattr(self.rules, rule))

    def keeps_times(self, path: object, dir_fd: object) -> bool:
        """Return whether a file's times must stay as they are; what cannot be judged may have them set."""
        if self.is_quiet():
            return False
        try:
            return self.rules.keeps_times(path, dir_fd)
        except Exception:
            return False

    def note(self, note: Callable[..., object], *arguments: object) -> None:
        """Note something that has happened; a fault of it is ignored."""
        if self.is_quiet():
            return
        try:
            self.quietly(lambda: note(*arguments))
        except Exception:
            return

    def _report_file(self, action: str, path: str, existed: bool) -> None:
        self._report(lambda: self._on_file(action, path, existed))

    def report_child(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Report a child process."""
        command = arguments[_CHILDREN[event]]
        position = _ENVIRONMENTS.get(event, len(arguments))
        environment = arguments[position] if position < len(arguments) else None
        self._report(lambda: self._on_child(_command_line(command), keeps_the_rules(command, environment)))

    def looked_up(self, name: object) -> None:
        """Judge a function of a library in C that is looked up by its name: its calls cannot be seen."""
        if name in LIBC_WRITERS and self._of_user():
            self.judge(self.rules.called_from_c, name)
        elif name in LIBC_STARTERS and self._of_user():
            self._report(lambda: self._on_child(f"{name}() of the C library", False))

    def _report(self, callback: Callable[[], object]) -> None:
        if self.is_quiet():
            return
        try:
            self.quietly(callback)
        except Exception:
            return


def _hook_of(guard: _Guard) -> Callable[[str, tuple[Any, ...]], None]:
    """Build the audit hook.

    ``safetensors`` is wrapped when the file of one of its submodules is opened: after its package was imported, before
    the submodule takes the writer from it.
    """
    rules, children = _RULES, _CHILDREN

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in rules:
            if event == "open" and not _is_for_writing(arguments):
                if arguments and "safetensors" in str(arguments[0]):
                    wrap_safetensors(_judge_saving, settle)
                return
            name, positions = rules[event]
            chosen = [arguments[index] if index < len(arguments) else None for index in positions]
            settle()
            guard.judge(getattr(guard.rules, name), *chosen)
        elif event in _NOTED and arguments:
            guard.note(getattr(guard.rules, _NOTED[event]), arguments[0])
        elif event in children and len(arguments) > children[event]:
            settle(at_end=event == "os.exec")
            guard.report_child(event, arguments)
        elif event == "ctypes.dlsym" and len(arguments) > 1:
            guard.looked_up(arguments[1])

    return hook


def _is_for_writing(arguments: tuple[Any, ...]) -> bool:
    return len(arguments) > 2 and isinstance(arguments[2], int) and bool(arguments[2] & _WRITING)


def keeps_the_rules(command: object, environment: object) -> bool:
    """Return whether a child is a Python in which the rules are in force, too."""
    words = [_text(word) for word in command] if isinstance(command, (list, tuple)) else []
    if not words or not re.fullmatch(r"python[\d.]*", os.path.basename(words[0])):
        return False
    for word in words[1:]:
        if not word.startswith("-") or word in ("-", "-c", "-m"):
            break
        if not word.startswith("--") and set("ISE") & set(word):
            return False
    if environment is None:
        return True
    try:
        names = {_text(name) for name in dict(environment)}  # type: ignore[call-overload]
    except (TypeError, ValueError):
        names = {_text(entry).partition("=")[0] for entry in environment} if isinstance(environment, list) else set()
    return {layout.RUN_VARIABLE, "PYTHONPATH"} <= names


def _command_line(command: object) -> str:
    if isinstance(command, (list, tuple)):
        return shlex.join(_text(word) for word in command)
    return _text(command)


def _text(word: object) -> str:
    return os.fsdecode(word) if isinstance(word, (str, bytes, os.PathLike)) else str(word)


# What the overlay that keeps the user's files cannot do.

REASON = "overlay"
_OF_OTHERS = os.strerror(errno.EOVERFLOW)
"""The kernel's error where a file belongs to a user without a number in the user namespace of the box."""


def caused_by_overlay(error: BaseException, mount_points: Optional[Mapping[str, bool]]) -> str:
    """Return ``overlay`` when an exception, or what led to it, comes of the overlay; empty otherwise.

    ``mount_points`` holds for those outside the box whether they are read-only; None where there is no overlay.
    """
    if mount_points is None:
        return ""
    seen: Optional[BaseException] = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno == errno.EROFS:
            return "" if _is_read_only(seen.filename, mount_points) else REASON
        # Writers of C++ give the text alone.
        if isinstance(seen, (OSError, RuntimeError)) and _OF_OTHERS in str(seen):
            return REASON
        seen = seen.__cause__ or seen.__context__
    return ""


def mount_of(path: str, mount_points: Mapping[str, bool]) -> str:
    """Return the mount point outside the box that a real path lies below."""
    within = (point for point in mount_points if (path + "/").startswith(point.rstrip("/") + "/"))
    return max(within, key=len, default="/")


def _is_read_only(name: object, mount_points: Mapping[str, bool]) -> bool:
    if not isinstance(name, (str, bytes)):
        return False
    return mount_points.get(mount_of(os.path.realpath(os.fsdecode(name)), mount_points), False)


def cross_overlays(mount_points: Mapping[str, bool], quietly: Callable[[Callable[[], Any]], Any]) -> None:
    """Take the places of ``os.rename`` and ``os.replace``.

    ``mount_points`` are those outside the box: between two of them a rename fails in reality, too. ``quietly`` runs a
    call without what it does to files being judged or recorded.
    """
    for name in ("rename", "replace"):
        take_place(name, _across_overlays(getattr(os, name), mount_points, quietly))


def _across_overlays(
    rename: Callable[..., None], mount_points: Mapping[str, bool], quietly: Callable[[Callable[[], Any]], Any]
) -> Callable[..., None]:
    @functools.wraps(rename)
    def renamed(src: Any, dst: Any, *, src_dir_fd: Any = None, dst_dir_fd: Any = None) -> None:
        try:
            rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        except OSError as error:
            if error.errno != errno.EXDEV or src_dir_fd is not None or dst_dir_fd is not None:
                raise
            source, target = _real_name(src), _real_name(dst)
            if mount_of(source, mount_points) != mount_of(target, mount_points):
                raise
            quietly(lambda: _move(source, target, rename))

    return renamed


def _real_name(path: Any) -> str:
    """Return the path without symbolic links in its directories; the last name stays what it is."""
    text = os.fsdecode(path).rstrip("/") or "/"
    return os.path.join(os.path.realpath(os.path.dirname(text) or "."), os.path.basename(text))


def _move(source: str, target: str, rename: Callable[..., None]) -> None:
    """Copy beside the target, put the copy in its place, and delete the source; raises what a rename would raise."""
    is_directory = os.path.isdir(source) and not os.path.islink(source)
    if is_directory and os.path.lexists(target) and not os.path.isdir(target):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), source, None, target)
    if not is_directory and os.path.isdir(target) and not os.path.islink(target):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), source, None, target)
    if is_directory and os.path.isdir(target) and os.listdir(target):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), source, None, target)
    beside = tempfile.mkdtemp(dir=os.path.dirname(target))
    copy = os.path.join(beside, "copy")
    try:
        if is_directory:
            shutil.copytree(source, copy, symlinks=True)
        else:
            shutil.copy2(source, copy, follow_symlinks=False)
        rename(copy, target)
        shutil.rmtree(source) if is_directory else os.unlink(source)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
