"""Tells a failure that only the overlay brings about from one that the script would meet without it."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Optional

REASON = "overlay"
_OF_OTHERS = os.strerror(errno.EOVERFLOW)
"""The kernel's answer where a file belongs to somebody who has no number in the user namespace of the box."""


def caused(error: BaseException, mount_points: Optional[Mapping[str, bool]]) -> str:
    """``overlay`` when an exception, or what led to it, comes of the overlay; empty otherwise.

    ``mount_points`` says of those outside the box whether they are read-only; None where there is no overlay.
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
    """The mount point outside the box that a real path lies below."""
    within = (point for point in mount_points if (path + "/").startswith(point.rstrip("/") + "/"))
    return max(within, key=len, default="/")


def _is_read_only(name: object, mount_points: Mapping[str, bool]) -> bool:
    if not isinstance(name, (str, bytes)):
        return False
    return mount_points.get(mount_of(os.path.realpath(os.fsdecode(name)), mount_points), False)
