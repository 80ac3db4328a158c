"""What tells one state of one file from every other: where its content lies, how much it is, when it changed last."""

from __future__ import annotations

import os
from typing import NamedTuple, Optional

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
        """Tell whether a file is in this very state."""
        return (
            self.place == (status.st_dev, status.st_ino)
            and (self.size, self.mtime_ns) == (status.st_size, status.st_mtime_ns)
            and self.ctime_ns in (0, status.st_ctime_ns)
        )


def identity_of(status: os.stat_result) -> Identity:
    """The state that a file is in."""
    return Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def decoded(numbers: object) -> Optional[Identity]:
    """The state that five numbers describe; None for none; raises ValueError for anything else."""
    if numbers is None:
        return None
    if not isinstance(numbers, list) or len(numbers) != 5 or not all(type(number) is int for number in numbers):
        raise ValueError("no state of a file")
    return Identity(*numbers)
