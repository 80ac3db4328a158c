"""Lays an overlay over every file system that the script could write to: reads see the real files, writes do not stay.

A new root is built beside the old one and takes its place. Where the doctor is root, one overlay covers each file
system. For other users the kernel refuses an overlay over a directory in which something is mounted (those mounts are
locked to it): there each directory below gets one, and what lies in that directory itself is read-only.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from . import kernel
from .mounts import NO_FILES, Mount, holds_mounts, read_mountinfo, served_sockets, visible_mounts

MOST_SOCKETS = 1_000
_OF_THE_MACHINE = ("sys", "sysrq-trigger", "irq", "bus", "acpi", "fs")
"""Entries of /proc by which root changes the whole machine."""


class Layers:
    """The overlays of one box while it is built."""

    def __init__(self, directory: str, *, privileged: bool, keep: bool) -> None:
        """``directory`` is empty and takes the upper layers, on a disk where its file system can hold them."""
        self._privileged = privileged
        self._keep = keep
        self._directory = directory
        self._root = os.path.join(directory, "root")
        self._mounts = visible_mounts(read_mountinfo())
        self._number = 0
        self._upper_base = directory
        self.uppers: dict[str, str] = {}
        """By upper layer (relative to the layers' directory) the directory that it lies over."""
        self.read_only: list[str] = []
        """Directories that could be written to outside and in which nothing can be made or changed in the box."""

    def build(self, shared: str, places: Iterable[str]) -> None:
        """Make the new root; ``shared`` is the one directory in which what is written stays.

        Raises OSError where the kernel, or a security module, does not allow it, and where one of ``places``, in which
        the script is likely to write, cannot be covered.
        """
        kernel.mount("none", "/", None, kernel.RECURSIVE | kernel.PRIVATE)
        os.mkdir(self._root)
        self._choose_base()
        if not (self._privileged and self._overlay("/", self._root)):
            kernel.mount("/", self._root, None, kernel.BIND | kernel.RECURSIVE)
            # What no overlay covers, for whatever reason, cannot be written to.
            kernel.make_read_only(self._root, recursive=True)
            self._cover_below("/")
        for mount in self._mounts:
            if mount.point != "/":
                self._cover(mount)
        for place in (*places, "/tmp"):
            if not self._is_covered(os.path.realpath(place)):
                raise OSError(f"no overlay can cover {place}: something else is mounted below it, or its disk has none")
        self._connect_sockets()
        kernel.mount(shared, self._root + shared, None, kernel.BIND)
        hidden = kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC
        kernel.mount("tmpfs", self._root + self._directory, "tmpfs", hidden, "size=4k,mode=700")

    def enter(self) -> None:
        """Mount the processes of this PID namespace and make the new root the only one; raises OSError."""
        processes = self._root + "/proc"
        kernel.mount("proc", processes, "proc", kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC)
        for name in _OF_THE_MACHINE:
            if os.path.exists(f"{processes}/{name}"):
                kernel.mount(f"{processes}/{name}", f"{processes}/{name}", None, kernel.BIND)
                kernel.make_read_only(f"{processes}/{name}")
        kernel.change_root(self._root)

    def _cover(self, mount: Mount) -> None:
        """Lay an overlay over a file system, or leave it read-only."""
        point, target = mount.point, self._root + mount.point
        try:
            is_directory = stat.S_ISDIR(os.stat(point).st_mode)
        except OSError:
            return  # a mount point of another user, or of a server that does not answer
        devices = point == "/dev" or (mount.is_below("/dev") and mount.kind in NO_FILES)
        plain = mount.kind in NO_FILES or mount.read_only or mount.is_below("/sys") or devices
        if not plain and is_directory and self._overlay(point, target, in_memory=mount.in_memory):
            return
        if mount.kind == "proc" and point != "/proc":
            # It shows the processes outside, and by them their files.
            kernel.mount("tmpfs", target, "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, "size=4k,mode=755")
        elif self._privileged or mount.kind == "devpts":
            # Under an overlay that covers its parent it cannot be seen any more.
            kernel.mount(point, target, None, kernel.BIND)
            if mount.kind != "devpts":
                kernel.make_read_only(target)
        if point == "/dev":
            self._keep_from_disks()
            self._cover_entries(("/dev/shm",) if os.path.isdir("/dev/shm") else ())
        elif not plain:
            self._cover_below(point)

    def _cover_below(self, directory: str) -> None:
        """Cover what can be covered below a directory that cannot; the directory itself is read-only."""
        self._note_read_only(directory)
        if holds_mounts(directory, self._mounts):
            self._cover_entries(_directories_in(directory))

    def _cover_entries(self, paths: Iterable[str]) -> None:
        points = {mount.point for mount in self._mounts}
        for path in paths:
            # What is mounted has its own turn.
            if path not in points and not self._overlay(path, self._root + path):
                self._cover_below(path)

    def _note_read_only(self, directory: str) -> None:
        if os.access(directory, os.W_OK):
            self.read_only.append(directory)

    def _is_covered(self, path: str) -> bool:
        """Return whether what is written to ``path`` goes to an overlay, or could not be written outside either."""
        mount = max((mount for mount in self._mounts if _is_in(path, mount.point)), key=lambda mount: len(mount.point))
        overlay = max((lower for lower in self.uppers.values() if _is_in(path, lower)), key=len, default="")
        return mount.read_only or len(overlay) >= len(mount.point)

    def _keep_from_disks(self) -> None:
        """Put the empty device in the place of every disk: root could write to it past all overlays."""
        if not self._privileged:
            return
        with os.scandir("/dev") as entries:
            disks = [entry.path for entry in entries if stat.S_ISBLK(entry.stat(follow_symlinks=False).st_mode)]
        for disk in disks:
            kernel.mount("/dev/null", self._root + disk, None, kernel.BIND)

    def _overlay(self, lower: str, target: str, *, in_memory: bool = False) -> bool:
        """Mount an overlay over ``lower`` at ``target``; False where the kernel refuses, with nothing changed."""
        base = self._upper_base
        if in_memory and (not self._keep or lower == "/dev/shm"):
            base = self._memory(lower)
        self._number += 1
        upper, work = f"{base}/upper-{self._number}", f"{base}/work-{self._number}"
        os.mkdir(upper)
        os.mkdir(work)
        descriptors: list[int] = []
        try:
            _imitate(lower, upper)
            # By descriptors: in the options of an overlay a comma or a colon of a path would end the path.
            descriptors += [os.open(path, os.O_PATH | os.O_DIRECTORY) for path in (lower, upper, work)]
            places = zip(("lowerdir", "upperdir", "workdir"), descriptors)  # noqa: B905 - as many as there are
            options = [f"{name}=/proc/self/fd/{number}" for name, number in places]
            options += ["redirect_dir=on"] if self._privileged else ["userxattr"]
            kernel.mount("overlay", target, "overlay", 0, ",".join(options))
        except OSError:
            return False
        finally:
            for number in descriptors:
                os.close(number)
        self.uppers[os.path.relpath(upper, self._directory)] = lower
        return True

    def _choose_base(self) -> None:
        """Keep the upper layers on the disk where that can hold them, otherwise (NFS) in memory; raises OSError."""
        empty = os.path.join(self._directory, "empty")
        os.mkdir(empty)
        if not self._overlay(empty, empty):
            self._upper_base = self._memory("/tmp")
            if not self._overlay(empty, empty):
                raise OSError("the kernel refuses overlays")
        self.uppers.clear()

    def _memory(self, like: str) -> str:
        """Return a new directory in memory, as large as the file system that ``like`` lies on, or as half of the
        memory.
        """
        self._number += 1
        base = f"{self._directory}/memory-{self._number}"
        os.mkdir(base)
        state = os.statvfs(like)
        in_memory = any(mount.point == like and mount.in_memory for mount in self._mounts)
        size = f"size={state.f_blocks * state.f_frsize}," if in_memory and state.f_blocks else ""
        kernel.mount("tmpfs", base, "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, size + "mode=700")
        return base

    def _connect_sockets(self) -> None:
        """Connect the box with the machine's services (name service, display, GPU daemons) that this user can reach.

        In an overlay a socket is another file than the one that its server listens on.
        """
        connected: set[str] = set()
        for named in served_sockets(_text("/proc/net/unix")):
            # A link with a root of its own (/var/run) would lead out of the new root.
            path = os.path.join(os.path.realpath(os.path.dirname(named)), os.path.basename(named))
            if path in connected or len(connected) >= MOST_SOCKETS:
                continue
            connected.add(path)
            try:
                if stat.S_ISSOCK(os.lstat(path).st_mode) and stat.S_ISSOCK(os.lstat(self._root + path).st_mode):
                    kernel.mount(path, self._root + path, None, kernel.BIND)
            except OSError:
                continue


def _is_in(path: str, directory: str) -> bool:
    return (path + "/").startswith(directory.rstrip("/") + "/")


def _imitate(lower: str, upper: str) -> None:
    """Give an upper layer the owner, as far as this user may, and the mode of what it lies over."""
    status = os.stat(lower)
    try:
        os.chown(upper, status.st_uid, status.st_gid)
    except OSError:
        pass
    os.chmod(upper, stat.S_IMODE(status.st_mode))


def _directories_in(directory: str) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()
