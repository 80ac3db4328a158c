"""Lays an overlay over every file system that the script could write to: reads see the real files, writes do not stay.

A new root is built beside the old one and takes its place. Where the doctor is root, one overlay covers each file
system. For other users the kernel refuses an overlay over a directory in which something is mounted (those mounts are
locked to it): there each directory below gets one, and what lies in that directory itself is read-only.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping

from . import kernel, reach
from .mounts import NO_FILES, Mount, holds_mounts, read_mountinfo, visible_mounts

_OF_OTHERS = ("proc", "devpts", "devtmpfs", "mqueue")
"""File systems that a container beside this one, or a chroot, has mounted a second time."""


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
        self.unseen: list[str] = []
        """Directories that no overlay covers and in which sockets of programs outside may be reached."""

    def build(
        self,
        shared: str,
        places: Iterable[str],
        served: Iterable[str],
        sockets: Iterable[str],
        *,
        names: Mapping[str, str] | None,
    ) -> None:
        """Make the new root; ``shared`` is the one directory in which what is written stays.

        ``served`` are the machine's Unix sockets, ``sockets`` those that the user lets the script reach, beside the
        services that every program asks. ``names`` are those of this machine, with their addresses, where the network
        is closed.

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
            if mount.point not in ("/", "/dev") and not mount.is_below("/dev"):
                self._cover(mount)
        self._make_devices(network=names is None)
        for place in (*places, "/tmp"):
            if not self._is_covered(os.path.realpath(place)):
                raise OSError(f"no overlay can cover {place}: something else is mounted below it, or its disk has none")
        if names is not None:
            reach.name_hosts(self._root, self._directory, names)
        reach.connect_sockets(self._root, served, sockets)
        kernel.mount(shared, self._root + shared, None, kernel.BIND)
        hidden = kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC
        kernel.mount("tmpfs", self._root + self._directory, "tmpfs", hidden, "size=4k,mode=700")

    def enter(self) -> None:
        """Mount the processes of this PID namespace and make the new root the only one; raises OSError."""
        processes = self._root + "/proc"
        kernel.mount("proc", processes, "proc", kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC)
        # All but the processes are of the whole machine, which root could change by them.
        with os.scandir(processes) as entries:
            names = [entry.name for entry in entries if not entry.name.isdecimal() and not entry.is_symlink()]
        for name in names:
            kernel.mount(f"{processes}/{name}", f"{processes}/{name}", None, kernel.BIND)
            kernel.make_read_only(f"{processes}/{name}")
        kernel.change_root(self._root)

    def _cover(self, mount: Mount) -> None:
        """Lay an overlay over a file system, or leave it read-only."""
        point, target = mount.point, self._root + mount.point
        try:
            mode = os.stat(point).st_mode
        except OSError:
            return  # a mount point of another user, or of a server that does not answer
        if mount.kind in _OF_OTHERS and point != "/proc":
            # It shows processes outside, and by them their files, or terminals and devices.
            kernel.mount("tmpfs", target, "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, "size=4k,mode=755")
        elif reach.is_channel(mode):
            # What is mounted there by a container engine is often its own socket.
            reach.hide(target)
        elif mount.kind in NO_FILES or not stat.S_ISDIR(mode):
            self._show_read_only(point, target)
        elif not self._overlay(point, target, in_memory=mount.in_memory):
            self._show_read_only(point, target)
            self._cover_below(point)
        elif mount.read_only:
            # The overlay alone keeps the script from the sockets that lie there.
            kernel.make_read_only(target)

    def _show_read_only(self, point: str, target: str) -> None:
        if self._privileged:
            # Under an overlay that covers its parent it cannot be seen any more.
            kernel.mount(point, target, None, kernel.BIND)
            kernel.make_read_only(target)

    def _make_devices(self, *, network: bool) -> None:
        """Make /dev, with a shared memory in which what lies outside can be read."""
        os.makedirs(self._root + "/dev", exist_ok=True)
        reach.make_devices(self._root + "/dev", network=network)
        if os.path.isdir("/dev/shm") and not self._overlay("/dev/shm", self._root + "/dev/shm", in_memory=True):
            kernel.mount(self._memory("/dev/shm"), self._root + "/dev/shm", None, kernel.BIND)
            os.chmod(self._root + "/dev/shm", 0o1777)

    def _cover_below(self, directory: str) -> None:
        """Cover what can be covered below a directory that cannot; the directory itself is read-only."""
        self._note_read_only(directory)
        holds = holds_mounts(directory, self._mounts)
        if not reach.hide_channels(self._root, directory, deep=not holds):
            self.unseen.append(directory)
        if holds:
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
            kernel.mount("overlay", target, "overlay", kernel.NO_DEVICES, ",".join(options))
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
