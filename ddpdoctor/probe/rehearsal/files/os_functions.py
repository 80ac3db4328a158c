"""Replacements of functions of ``os`` that have no audit event in Python, or one that lacks something."""

from __future__ import annotations

import functools
import os
import stat
import sys
from collections.abc import Callable
from typing import Any

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
