"""The system calls that the box needs and Python's standard library lacks."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# What is mounted where, and who listens on which socket, read from the kernel's lists.

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


NEW_MOUNTS = 0x00020000
NEW_IPC = 0x08000000
NEW_USERS = 0x10000000
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000

NO_SUID, NO_DEVICES, NO_EXEC = 0x2, 0x4, 0x8
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000

_DETACH = 0x2
_MOUNT_SETATTR = 442
"""Number of the system call, the same on every architecture since Linux 5.12; glibc wraps it since 2.36 only."""
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_ATTRIBUTE_READ_ONLY = 0x1
_READ_BOUNDING_SET, _DROP_FROM_BOUNDING_SET = 23, 24
_AMBIENT_SET, _CLEAR_ALL = 47, 4
NEW_LINK, NEW_ADDRESS = 16, 20
_REQUEST_NEW = 0x605
"""A request to make what is not there yet, with an answer."""
_GET_INTERFACE_FLAGS, _SET_INTERFACE_FLAGS, _INTERFACE_UP = 0x8913, 0x8914, 0x1

_KEPT = (0, 1, 3, 4, 5, 6, 7, 10, 13, 14, 18, 23, 24)
"""Capabilities that root keeps: over files and their owners (chown, dac_override, fowner, fsetid), its processes (kill,
setgid, setuid, sys_nice, sys_resource), ports and packets (net_bind_service, net_raw), locked memory (ipc_lock), and
changing its root. With others it could mount, open files by their number, make devices, or take over the first process.
"""
_CAPABILITIES_VERSION = 0x20080522

_SET_DUMPABLE, _NO_NEW_PRIVILEGES, _SECCOMP = 4, 38, 22
_LOAD = (0x20, 0, 0)
"""Of the filter's machine: load a word of ``struct seccomp_data``; 0x15 jumps where it is equal, 0x35 where it is at
least as large, 0x45 where it has one of the bits, 0x06 answers."""
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
"""Of sockets: each has its namespace. AF_VSOCK, for one, reaches the machine that this virtual one runs on."""


class _Numbers(NamedTuple):
    """Of system calls on one kind of processor."""

    socket: int
    without: tuple[int, ...]
    """``add_key``, ``request_key``, ``keyctl``, ``io_uring_setup``, and ``clone3``, whose flags lie out of sight: who
    finds it missing takes ``clone``."""
    flagged: tuple[int, ...]
    """``unshare`` and ``clone``."""
    most: int
    """From here on the numbers mean something else: those of x32."""


_CALLS = {
    "x86_64": (0xC000003E, _Numbers(41, (248, 249, 250, 425, 435), (272, 56), 0x40000000)),
    "aarch64": (0xC00000B7, _Numbers(198, (217, 218, 219, 425, 435), (97, 220), 0x40000000)),
}

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Give this process namespaces of its own; raises OSError where the kernel does not allow it."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    """``mount(2)``; raises OSError."""
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    result = _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    _checked(result, f"mount {kind or 'bind'} on {target}")


def make_read_only(target: str, *, recursive: bool = False) -> None:
    """Let nothing be written below a mount point; device nodes there work on. Raises OSError (Linux < 5.12)."""
    attributes = struct.pack("=QQQQ", _ATTRIBUTE_READ_ONLY, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        os.fsencode(target),
        ctypes.c_uint(_AT_RECURSIVE if recursive else 0),
        attributes,
        ctypes.c_size_t(len(attributes)),
    )
    _checked(result, f"make {target} read-only")


def change_root(root: str) -> None:
    """Make a mount point the root of this mount namespace and let go of the old one; raises OSError."""
    os.chdir(root)
    _checked(_libc.pivot_root(b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", ctypes.c_int(_DETACH)), "detach the old root")


def give_up_powers() -> None:
    """Keep this process, and all that it starts, from mounting and from changing the machine, even as root; OSError."""
    for capability in range(64):
        if _libc.prctl(_READ_BOUNDING_SET, capability, 0, 0, 0) == 1 and capability not in _KEPT:
            _checked(_libc.prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0), "give up a capability")
    _libc.prctl(_AMBIENT_SET, _CLEAR_ALL, 0, 0, 0)  # Linux before 4.3 has none
    kept = sum(1 << capability for capability in _KEPT)
    header = struct.pack("=Ii", _CAPABILITIES_VERSION, 0)
    has = ctypes.create_string_buffer(24)
    _checked(_libc.capget(header, has), "read the capabilities")
    low, high = struct.unpack("=6I", has.raw)[1::3]
    permitted = (low | high << 32) & kept
    halves = (permitted & 0xFFFFFFFF, permitted >> 32)
    sets = struct.pack("=6I", halves[0], halves[0], 0, halves[1], halves[1], 0)
    _checked(_libc.capset(header, sets), "give up the capabilities")


def bring_up(name: str) -> None:
    """Bring up an interface of this network namespace; raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", name.encode(), 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(control, _GET_INTERFACE_FLAGS, request), 16)
        request = struct.pack("16sH14x", name.encode(), flags | _INTERFACE_UP)
        fcntl.ioctl(control, _SET_INTERFACE_FLAGS, request)


def attribute(number: int, value: bytes) -> bytes:
    """Return an attribute of a netlink message."""
    return struct.pack("=HH", 4 + len(value), number) + value + bytes(-len(value) % 4)


def ask_netlink(kind: int, body: bytes, attributes: Iterable[tuple[int, bytes]], more: bytes = b"") -> None:
    """Have the kernel make an interface or an address of this network namespace; raises OSError."""
    content = body + b"".join(attribute(number, value) for number, value in attributes) + more
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as line:
        line.send(struct.pack("=IHHII", 16 + len(content), kind, _REQUEST_NEW, 1, 0) + content)
        (failure,) = struct.unpack_from("=i", line.recv(4096), 16)
    if failure:
        raise OSError(-failure, os.strerror(-failure))


def hide_from_children() -> None:
    """Keep other processes from this one's memory and from what ``/proc`` shows of it; those that it execs are seen.

    Its program lies outside of the box: by ``/proc/1/exe`` root could change the mode of the machine's own Python.
    """
    _checked(_libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0), "hide the first process")


def filter_calls() -> None:
    """Let this process, and all that it starts, make no call that no namespace covers; raises OSError.

    These are sockets to the hypervisor and to other buses, keys that the kernel keeps for the user, io_uring, which
    would open the same sockets past this filter, and user namespaces, in which mounts could be moved again. On a
    processor without a row there is no filter.
    """
    if os.uname().machine not in _CALLS:
        return
    architecture, numbers = _CALLS[os.uname().machine]
    refused = [
        *(step for number in numbers.without for step in ((0x15, 0, 1, number), _refuse(errno.ENOSYS))),
        *(step for number in numbers.flagged for step in _without_users(number)),
    ]
    program = [
        *(_LOAD + (4,), (0x15, 1, 0, architecture), _refuse(errno.ENOSYS)),
        *(_LOAD + (0,), (0x35, 0, 1, numbers.most), _refuse(errno.ENOSYS)),
        *refused,
        *((0x15, 0, len(_FAMILIES) + 2, numbers.socket), _LOAD + (16,)),
        *((0x15, len(_FAMILIES) - place, 0, family) for place, family in enumerate(_FAMILIES)),
        *(_refuse(errno.EAFNOSUPPORT), (0x06, 0, 0, _ALLOW)),
    ]
    steps = b"".join(struct.pack("=HBBI", *step) for step in program)
    kept = ctypes.create_string_buffer(steps, len(steps))
    what = struct.pack("=HxxxxxxQ", len(program), ctypes.addressof(kept))
    _checked(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "give up further privileges")
    _checked(_libc.prctl(_SECCOMP, 2, ctypes.c_char_p(what), 0, 0), "filter the system calls")


def _without_users(number: int) -> tuple[tuple[int, int, int, int], ...]:
    """Return the steps that refuse a call whose first argument asks for a user namespace."""
    allow = (0x06, 0, 0, _ALLOW)
    return (0x15, 0, 4, number), (*_LOAD, 16), (0x45, 0, 1, NEW_USERS), _refuse(errno.EPERM), allow


def _refuse(error: int) -> tuple[int, int, int, int]:
    return 0x06, 0, 0, _FAIL | error
