"""From what a script hands to the operating system to the path of the file that it means."""

from __future__ import annotations

import fcntl
import os
import stat


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
