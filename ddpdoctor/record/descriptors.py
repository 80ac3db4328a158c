"""Opens the files of the record in a training process; stdlib only."""

from __future__ import annotations

import fcntl
import os
import resource

_BELOW_THE_LIMIT = 64
_AT_MOST = 1024
"""A fork copies the table of descriptors up to the highest one."""


def fits(size_bytes: int) -> bool:
    """Return whether a file may have this size: one that is too large ends a process that has given SIGXFSZ its
    default back, which Python ignores. Takes 0.3 µs.
    """
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return most == resource.RLIM_INFINITY or size_bytes <= most


def private_descriptor(path: str, flags: int) -> int:
    """Open a file with a descriptor that no file of the script's gets: one near the limit of the process.

    A script may close all descriptors (``os.closerange``), and the file that it opens next gets the lowest number:
    with ours, our rows would go into it. Raises OSError.
    """
    low = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = _AT_MOST if most == resource.RLIM_INFINITY else min(most, _AT_MOST)
        high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, max(0, most - _BELOW_THE_LIMIT))
    except (OSError, ValueError):
        return low
    os.close(low)
    return high
