"""What is mounted where, and who listens on which socket, read from the kernel's lists."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

NO_FILES = frozenset(
    {
        *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs"),
        *("fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "selinuxfs", "sysfs"),
        "tracefs",
    }
)
"""File systems of the kernel's own, which no overlay can cover; they are read-only in the box."""

_ESCAPED = re.compile(rb"\\([0-7]{3})")


class Mount(NamedTuple):
    """One line of ``/proc/self/mountinfo``."""

    point: str
    kind: str
    read_only: bool

    @property
    def in_memory(self) -> bool:
        """Its files lie in memory."""
        return self.kind in ("tmpfs", "ramfs")

    def is_below(self, directory: str) -> bool:
        """Return whether it is mounted somewhere under ``directory``, and not at it."""
        return self.point != directory and self.point.startswith(directory.rstrip("/") + "/")


def read_mountinfo() -> bytes:
    """Return the kernel's list of this process's mounts; raises OSError where there is none."""
    with open("/proc/self/mountinfo", "rb") as file:
        return file.read()


def visible_mounts(mountinfo: bytes) -> tuple[Mount, ...]:
    """Return the mounts that a path can reach, parents before what is mounted in them.

    A later mount hides an earlier one at the same place and below it: the kernel lists them in that order.
    """
    kept: dict[str, Mount] = {}
    parents: set[str] = set()
    for line in filter(None, mountinfo.split(b"\n")):
        fields, _, rest = line.partition(b" - ")
        words, more = fields.split(b" "), rest.split(b" ")
        point = os.fsdecode(_ESCAPED.sub(lambda match: bytes((int(match[1], 8),)), words[4]))
        if point in parents:
            kept = {each: mount for each, mount in kept.items() if not mount.is_below(point)}
        read_only = b"ro" in words[5].split(b",") or b"ro" in more[-1].split(b",")
        kept[point] = Mount(point, os.fsdecode(more[0]), read_only)
        parents.update(_parents(point))
    return tuple(kept[point] for point in sorted(kept))


def _parents(path: str) -> Iterator[str]:
    while path != "/":
        path = os.path.dirname(path)
        yield path


def holds_mounts(directory: str, mounts: Iterable[Mount]) -> bool:
    """Return whether something is mounted below ``directory``."""
    return any(mount.is_below(directory) for mount in mounts)
