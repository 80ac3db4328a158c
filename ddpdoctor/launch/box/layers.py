"""Lays an overlay over every file system that the script could write to: reads see the real files, writes do not stay.

A new root is built beside the old one and takes its place. Where the doctor is root, one overlay covers each file
system. For other users the kernel refuses an overlay over a directory in which something is mounted (those mounts are
locked to it): there each directory below gets one, and what lies in that directory itself is read-only.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator

from . import kernel
from .mounts import NO_FILES, Mount, bound_sockets, holds_mounts, visible_mounts

MOST_SOCKETS = 1_000


class Layers:
    """The overlays of one box while it is built."""

    def __init__(self, directory: str, *, privileged: bool, keep: bool) -> None:
        """``directory`` is empty and takes the upper layers, on a disk where its file system can hold them."""
        self._privileged = privileged
        self._keep = keep
        self._directory = directory
        self._root = os.path.join(directory, "root")
        self._mounts = visible_mounts(_text("/proc/self/mountinfo"))
        self._number = 0
        self._upper_base = directory
        self.uppers: dict[str, str] = {}
        """By upper layer (relative to the layers' directory) the directory that it lies over."""
        self.read_only: list[str] = []
        """Directories that could be written to outside and in which nothing can be made or changed in the box."""
        self.renames_directories = privileged
        """A directory of a lower layer can be renamed; without it the kernel answers EXDEV, as between disks."""

    def build(self, shared: str) -> None:
        """Make the new root and enter it; ``shared`` is the one directory in which what is written stays.

        Raises OSError where the kernel, or a security module, does not allow it.
        """
        kernel.mount("none", "/", None, kernel.RECURSIVE | kernel.PRIVATE)
        os.mkdir(self._root)
        self._choose_base()
        if not (self._privileged and self._overlay("/", self._root)):
            kernel.mount("/", self._root, None, kernel.BIND | kernel.RECURSIVE)
            self._cover_below("/")
        for mount in self._mounts:
            if mount.point != "/":
                self._cover(mount)
        if os.path.isdir("/sys"):
            kernel.make_read_only(self._root + "/sys", recursive=True)
        for path in self._reachable_sockets():
            # In an overlay a socket is another file than the one that its server listens on.
            kernel.mount(path, self._root + path, None, kernel.BIND)
        kernel.mount(shared, self._root + shared, None, kernel.BIND)
        hidden = kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC
        kernel.mount("tmpfs", self._root + self._directory, "tmpfs", hidden, "size=4k,mode=700")

    def enter(self) -> None:
        """Mount the processes of this PID namespace and make the new root the only one; raises OSError."""
        kernel.mount("proc", self._root + "/proc", "proc", kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC)
        kernel.change_root(self._root)

    def _cover(self, mount: Mount) -> None:
        """Lay an overlay over a file system, or leave it as it is where it holds no files or is read-only anyway."""
        point, target = mount.point, self._root + mount.point
        try:
            is_directory = stat.S_ISDIR(os.stat(point).st_mode)
        except OSError:
            return  # a mount point of another user, or of a server that does not answer
        devices = point == "/dev" and mount.kind not in NO_FILES  # of a container: an overlay would open no device
        plain = mount.kind in NO_FILES or mount.read_only or mount.is_below("/sys")
        if not plain and not devices and is_directory and self._overlay(point, target, in_memory=mount.in_memory):
            return
        if self._privileged:
            # Under an overlay that covers its parent it cannot be seen any more.
            kernel.mount(point, target, None, kernel.BIND)
        if not plain:
            self._cover_below(point, ("/dev/shm",) if devices else None)

    def _cover_below(self, directory: str, entries: Iterable[str] | None = None) -> None:
        """Cover what can be covered below a directory that cannot; the directory itself becomes read-only."""
        if os.access(directory, os.W_OK):
            self.read_only.append(directory)
        kernel.make_read_only(self._root + directory)
        if entries is not None or holds_mounts(directory, self._mounts):
            self._cover_entries(_directories_in(directory) if entries is None else entries)

    def _cover_entries(self, paths: Iterable[str]) -> None:
        points = {mount.point for mount in self._mounts}
        for path in paths:
            # What is mounted has its own turn.
            covered = path in points or self._overlay(path, self._root + path)
            if not covered and holds_mounts(path, self._mounts):
                self._cover_entries(_directories_in(path))

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
        """A new directory in memory, as large as the file system that ``like`` lies on, or as half of the memory."""
        self._number += 1
        base = f"{self._directory}/memory-{self._number}"
        os.mkdir(base)
        state = os.statvfs(like)
        in_memory = any(mount.point == like and mount.in_memory for mount in self._mounts)
        size = f"size={state.f_blocks * state.f_frsize}," if in_memory and state.f_blocks else ""
        kernel.mount("tmpfs", base, "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, size + "mode=700")
        return base

    def _reachable_sockets(self) -> Iterator[str]:
        """Sockets of the machine's services (name service, display, GPU daemons) that this user can reach."""
        for path in bound_sockets(_text("/proc/net/unix"))[:MOST_SOCKETS]:
            try:
                if stat.S_ISSOCK(os.lstat(path).st_mode) and stat.S_ISSOCK(os.lstat(self._root + path).st_mode):
                    yield path
            except OSError:
                continue


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
