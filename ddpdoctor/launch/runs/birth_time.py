"""When a file was made, which Linux has in ``statx`` alone."""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_AT_FDCWD = -100
_AT_SYMLINK_NOFOLLOW = 0x100
_STATX_BTIME = 0x800
_STATX_BYTES = 256
_BTIME_OFFSET = 80
"""``struct statx``: the mask of filled fields comes first, ``stx_btime`` (seconds, nanoseconds) at byte 80."""


def born_ns(path: str) -> int | None:
    """Return when the file at ``path`` (not what it links to) was made, in ns since the epoch; None when unknown."""
    if not sys.platform.startswith("linux"):
        return _born_by_stat(path)
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except (OSError, AttributeError):
        return None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(_AT_FDCWD, os.fsencode(path), _AT_SYMLINK_NOFOLLOW, ctypes.c_uint(_STATX_BTIME), answer) != 0:
        return None
    (mask,) = struct.unpack_from("=I", answer, 0)
    if not mask & _STATX_BTIME:
        return None
    seconds, nanoseconds = struct.unpack_from("=qI", answer, _BTIME_OFFSET)
    return int(seconds) * 1_000_000_000 + int(nanoseconds)


def _born_by_stat(path: str) -> int | None:
    try:
        seconds = getattr(os.lstat(path), "st_birthtime", None)
    except OSError:
        return None
    return None if seconds is None else int(seconds * 1e9)
