"""What is mounted where, read from the kernel's list."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from typing import NamedTuple

NO_FILES = frozenset(
    {
        *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs"),
        *("fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "selinuxfs", "sysfs"),
        "tracefs",
    }
)
"""File systems that hold no files of anybody: the kernel's own, and devices. They are what they are in the box, too."""

_ESCAPED = re.compile(r"\\([0-7]{3})")


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
        """Tell whether it is mounted somewhere under ``directory``, and not at it."""
        return self.point != directory and self.point.startswith(directory.rstrip("/") + "/")


def visible_mounts(mountinfo: str) -> tuple[Mount, ...]:
    """The mounts that a path can reach, parents before what is mounted in them.

    A later mount hides an earlier one at the same place and below it: the kernel lists them in that order.
    """
    kept: list[Mount] = []
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        words = fields.split()
        point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), words[4])
        point = point.encode("latin-1", "surrogateescape").decode("utf-8", "surrogateescape")
        kind, _, options = rest.split(" ", 2)
        read_only = "ro" in words[5].split(",") or "ro" in options.split()[-1].split(",")
        kept = [mount for mount in kept if mount.point != point and not mount.is_below(point)]
        kept.append(Mount(point, kind, read_only))
    return tuple(sorted(kept))


def holds_mounts(directory: str, mounts: Iterable[Mount]) -> bool:
    """Tell whether something is mounted below ``directory``."""
    return any(mount.is_below(directory) for mount in mounts)


def bound_sockets(unix_sockets: str) -> tuple[str, ...]:
    """Paths of the Unix sockets that somebody listens or receives on, from ``/proc/net/unix``."""
    paths = []
    for line in unix_sockets.splitlines()[1:]:
        words = line.split(maxsplit=7)
        if len(words) < 8 or not words[7].startswith("/"):
            continue
        # One of datagrams, as that of the system log, listens to nobody; its path is nobody's but the receiver's.
        if int(words[3], 16) & _ACCEPTS_CONNECTIONS or int(words[4], 16) == socket.SOCK_DGRAM:
            paths.append(words[7])
    return tuple(dict.fromkeys(paths))


_ACCEPTS_CONNECTIONS = 0x10000
