"""Files that the job certainly made itself."""

from __future__ import annotations

import os
import stat
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
        """Return whether a file is in this very state."""
        return (
            self.place == (status.st_dev, status.st_ino)
            and (self.size, self.mtime_ns) == (status.st_size, status.st_mtime_ns)
            and self.ctime_ns in (0, status.st_ctime_ns)
        )


def identity_of(status: os.stat_result) -> Identity:
    """Return the state that a file is in."""
    return Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def decoded(numbers: object) -> Optional[Identity]:
    """Return the state that five numbers describe; None for none; raises ValueError for anything else."""
    if numbers is None:
        return None
    if not isinstance(numbers, list) or len(numbers) != 5 or not all(type(number) is int for number in numbers):
        raise ValueError("no state of a file")
    return Identity(*numbers)


_MOST_STATES = 32
_LAST_STATES = 4
"""What is renamed is in one of the last states that were recorded: while ranks write, a record may be on its way."""
WRITE_NOTED_EVERY_NS = 50_000_000
"""A process that writes on records the state of its file so often."""
_AFTER_A_NOTE_NS = 3 * WRITE_NOTED_EVERY_NS
"""What was written so soon after the last record of a process that was killed was written by it."""


class Made:
    """What the ranks made at one path."""

    def __init__(self, kind: str, time_ns: int) -> None:
        self.kind = kind
        self.time_ns = time_ns
        """The earliest time at which it may have been made."""
        self.identities: list[Identity] = []
        """The newest states that the ranks left, or saw while they wrote; the newest is last."""
        self.settled_ns = 0
        """When its newest state was recorded."""
        self.doubtful = False
        """Another program has written to it while a rank had it open."""
        self._announced: dict[int, int] = {}
        """Processes that were about to make it and have not recorded its state yet, with the time."""
        self._writers: dict[int, int] = {}
        """Processes that have it open for writing, with the time of their last record."""

    def announced(self, pid: int, time_ns: int) -> None:
        """Note that a process is about to make it."""
        self._announced[pid] = time_ns
        self.doubtful = False

    def changed(self, kind: str, identity: Optional[Identity], pid: int, time_ns: int) -> None:
        """Apply a record of its state."""
        if kind == "doubtful":
            self.doubtful = True
        elif kind == "relabelled":
            self.identities = [each._replace(ctime_ns=0) for each in self.identities]
            if identity is not None and any(each[:3] == identity[:3] for each in self.identities):
                self.identities.append(identity)
        else:
            self._announced.pop(pid, None)
            if kind == "open":
                self._writers[pid] = time_ns
            else:
                self._writers.pop(pid, None)
            if identity is not None:
                self.settled_ns = time_ns
                self.identities = [*(each for each in self.identities if each != identity), identity][-_MOST_STATES:]

    def renamed(self, replaced: Optional[Made]) -> Made:
        """Return the same under another name, at which the ranks may have made something before."""
        moved = Made(self.kind, self.time_ns)
        moved.identities = [each._replace(ctime_ns=0) for each in self.identities[-_LAST_STATES:]]
        moved._announced, moved._writers = dict(self._announced), dict(self._writers)
        moved.settled_ns, moved.doubtful = self.settled_ns, self.doubtful
        if replaced is not None and replaced.kind == self.kind:
            # Until the rename is done, which comes after its record, the other ranks still find the old file.
            moved.identities = [*replaced.identities, *moved.identities][-_MOST_STATES:]
        return moved

    def knows(self, status: os.stat_result) -> bool:
        """Return whether a process of the rehearsal recorded this very state."""
        return any(identity.fits(status) for identity in self.identities)

    def has_other_writers(self, pid: int) -> bool:
        """Return whether a process of the rehearsal beside this one has it open for writing, or is about to."""
        return bool((self._writers.keys() | self._announced.keys()) - {pid})

    def is_at_work_or_left(self, status: os.stat_result) -> bool:
        """Return, while ranks run, whether what is there is theirs: as one left it, or being written by one."""
        if self.doubtful or not self.is_of_kind(status):
            return False
        if self._is_left(status) or (self._writers and self._is_same_file(status)):
            return True
        return any(status.st_ctime_ns >= time_ns - CLOCK_SLACK_NS for time_ns in self._announced.values())

    def is_certain(self, status: os.stat_result) -> bool:
        """Return, when no rank runs any more, whether what is there is theirs and was not changed since."""
        if self.doubtful or not self.is_of_kind(status):
            return False
        if self._is_left(status):
            return True
        return self._is_same_file(status) and any(
            status.st_mtime_ns <= time_ns + _AFTER_A_NOTE_NS for time_ns in self._writers.values()
        )

    def may_be_unfinished(self, status: os.stat_result) -> bool:
        """Return whether a rank may have been killed before it recorded in which state it left this."""
        if self.identities and not self._is_same_file(status):
            return False
        return bool(self._announced or self._writers) and status.st_ctime_ns >= self.time_ns - CLOCK_SLACK_NS

    def _is_left(self, status: os.stat_result) -> bool:
        if self.kind == "directory":
            return self._is_same_file(status)
        if self.kind == "name" and stat.S_ISREG(status.st_mode):
            # Only the name is the ranks'; while the content has another one, nothing is lost with it.
            return status.st_nlink > 1 and self._is_same_file(status)
        return self.knows(status)

    def _is_same_file(self, status: os.stat_result) -> bool:
        return any(identity.place == (status.st_dev, status.st_ino) for identity in self.identities)

    def is_of_kind(self, status: os.stat_result) -> bool:
        """Return whether there is now what was to be made."""
        mode = status.st_mode
        if self.kind == "directory":
            return stat.S_ISDIR(mode)
        if self.kind == "socket":
            return stat.S_ISSOCK(mode)
        if self.kind == "pipe":
            return stat.S_ISFIFO(mode)
        if self.kind == "name":
            return stat.S_ISLNK(mode) or stat.S_ISREG(mode)
        return stat.S_ISREG(mode)
