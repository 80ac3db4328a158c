"""What the ranks did to files, and how they reached them."""

from __future__ import annotations

from typing import Literal

import msgspec

FileAction = Literal[
    "create", "write", "save", "read", "load", "remove", "rename", "mkdir", "refused", "child-process", "held-child"
]
"""``held-child``: a Python that keeps the rules of the rehearsal; ``child-process``: any other program."""
AccessAction = Literal["read", "write", "check", "make", "remove", "move", "lock"]


class FileEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the ranks did to a file, or a child process that they started."""

    rank: int
    action: FileAction
    path: str
    site: int = -1
    time_ns: int = 0
    existed: bool = False
    """The file existed before the run."""
    detail: str = ""
    """What would have happened, when refused; the command of a child process."""


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """A rank reached a path: what it was about to do there, whatever became of it."""

    rank: int
    action: AccessAction
    """``check``: asked whether it exists. ``make``: of a directory. ``lock``: took a lock, or a file as one."""
    path: str
    site: int = -1
    time_ns: int = 0
    found: bool = False
    """There was something under the path."""
    through: str = ""
    """The library that fetches or extracts (``zipfile``, ``urllib``, …) and stands between the user and the call;
    ``flock`` of a lock on an open file."""
