"""The overlay that keeps the user's files, and what it cannot do."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, Optional

from .open_files import take_place

REASON = "overlay"
_OF_OTHERS = os.strerror(errno.EOVERFLOW)
"""The kernel's error where a file belongs to a user without a number in the user namespace of the box."""


def caused(error: BaseException, mount_points: Optional[Mapping[str, bool]]) -> str:
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


def install(mount_points: Mapping[str, bool], quietly: Callable[[Callable[[], Any]], Any]) -> None:
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
