"""Runs a command in the box: makes the namespaces, lays the layers, and is the first process of what it starts.

Started by ``launch.box.start`` as a program of its own, with the standard library alone. Two processes stay: one
outside the PID namespace, whom the supervisor knows, and the first one of the namespace. When that one ends, the kernel
kills every other process there, whatever sessions and environments they have given themselves.
"""

from __future__ import annotations

import errno
import grp
import json
import os
import pwd
import resource
import select
import signal
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from . import kernel, reach
from .kernel import NO_FILES, Mount, holds_mounts, read_mountinfo, visible_mounts

# Lays an overlay over every file system that the script could write to: reads see the real files, writes do not
# stay.

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
        """Return a new directory in memory, as large as the file system of ``like``, or as half of the memory."""
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


# A user namespace in which every process keeps the user and the groups that it has outside.

Ranges = Sequence[tuple[int, int]]
"""First number and count."""


def enter_user_namespace(flags: int, places: Iterable[str]) -> None:
    """Make the namespace, and those of ``flags`` in it.

    Raises OSError where the kernel does not allow it, or where one of ``places``, directories in which the script is
    likely to write, belongs to someone whom an overlay cannot stand for.
    """
    owners = [(place, os.stat(place)) for place in places]
    all_users, all_groups = _ranges("/proc/self/uid_map"), _ranges("/proc/self/gid_map")
    own_user, own_group = [(os.geteuid(), 1)], [(os.getegid(), 1)]
    if _unshare_and_map(flags, all_users, all_groups):
        return
    for place, status in owners:
        if not (_holds(own_user, status.st_uid) and _holds(own_group, status.st_gid)):
            raise OSError(f"{place} belongs to {_owner(status)}, and cannot be covered by an overlay of this user")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/gid_map", _lines(own_group))
    _write("/proc/self/uid_map", _lines(own_user))


def _unshare_and_map(flags: int, users: Ranges, groups: Ranges) -> bool:
    """Make the namespaces; True when a process that stayed outside could map every user and group."""
    waiting, ready = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(ready)
        os.read(waiting, 1)
        parent = os.getppid()
        try:
            _write(f"/proc/{parent}/gid_map", _lines(groups))
            _write(f"/proc/{parent}/uid_map", _lines(users))
        except OSError:
            os._exit(1)
        os._exit(0)
    os.close(waiting)
    try:
        kernel.unshare(kernel.NEW_USERS)
    finally:
        os.close(ready)
        _, status = os.waitpid(helper, 0)
    kernel.unshare(flags)
    return status == 0


def _ranges(path: str) -> Ranges:
    """Return the numbers that users, or groups, have in this process's own namespace."""
    with open(path, encoding="ascii") as file:
        return [(int(inside), int(count)) for inside, _, count in map(str.split, file)]


def _holds(ranges: Ranges, number: int) -> bool:
    return any(first <= number < first + count for first, count in ranges)


def _lines(ranges: Ranges) -> str:
    return "".join(f"{first} {first} {count}\n" for first, count in ranges)


def _owner(status: os.stat_result) -> str:
    try:
        user = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        user = str(status.st_uid)
    try:
        group = grp.getgrgid(status.st_gid).gr_name
    except KeyError:
        group = str(status.st_gid)
    return f"user {user} and group {group}"


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


NOT_BUILT = 125
"""Exit code when the command was not started because the box could not be built."""
_NOT_FOUND = 127
_REASONS = {
    errno.EPERM: "user namespaces or mounts are forbidden here, by AppArmor, seccomp or a setting of the kernel",
    errno.EACCES: "user namespaces or mounts are forbidden here, by AppArmor, seccomp or a setting of the kernel",
    errno.ENOSPC: "no further user namespace is allowed here (user.max_user_namespaces)",
    errno.ENOSYS: "Linux 5.12 or newer is needed",
}
"""What the kernel's answers mean to someone who wants an overlay."""


def main(plan_path: str) -> NoReturn:
    """Build the box that the plan describes and run its command; exits as the command does, 128 + N for a signal N.

    Writes one line of JSON to the plan's ``report`` descriptor before the command starts: ``{"error": …}``, or what
    the layers are. When nothing holds the other end of ``alive`` any more, everything ends.
    """
    with open(plan_path, encoding="utf-8") as file:
        plan = json.load(file)
    try:
        layers = _build(plan)
        child = os.fork()
    except OSError as error:
        _refuse(plan, error)
    if child == 0:
        _first_process(plan, layers)
    os.close(plan["report"])
    os.close(plan["alive"])
    _, status = os.waitpid(child, 0)
    os._exit(_exit_code(status))


def _build(plan: dict[str, Any]) -> Layers:
    apart = kernel.NEW_PIDS | kernel.NEW_IPC | (0 if plan["network"] else kernel.NEW_NETWORK)
    # In a network of its own it is another list.
    served = reach.served_sockets() if os.path.exists("/proc/net/unix") else ()
    privileged = _unshare_as_root(apart)
    if not privileged:
        enter_user_namespace(kernel.NEW_MOUNTS | apart, plan["places"])
    if not plan["network"]:
        reach.make_network(plan["interfaces"])
    layers = Layers(plan["layers"], privileged=privileged, keep=plan["keep"])
    layers.build(plan["shared"], plan["places"], served, plan["sockets"], names=plan["names"])
    return layers


def _unshare_as_root(apart: int) -> bool:
    """Try it without a user namespace: its users other than root could not be distinguished."""
    if os.geteuid() != 0:
        return False
    try:
        kernel.unshare(kernel.NEW_MOUNTS | apart)
    except OSError:
        return False
    return True


def _first_process(plan: dict[str, Any], layers: Layers) -> NoReturn:
    """Enter the box, start the command, take leave of every orphan, and end with the command or the supervisor."""
    try:
        layers.enter()
        os.chdir(plan["directory"])
        log = reach.open_log() if plan["logs"] else None
        kernel.give_up_powers()
        kernel.filter_calls()
        kernel.hide_from_children()
        # The one that it was started with is the machine's, whose mode root could change.
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 0)
        os.close(null)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    except OSError as error:
        _refuse(plan, error)
    # Before the command starts: who does not listen any more wants none.
    _report(plan, {"uppers": layers.uppers, "read_only": layers.read_only, "unseen": layers.unseen})
    command = os.fork()
    if command == 0:
        _become(plan)
    listened = (plan["alive"], woken, *(() if log is None else (log,)))
    while True:
        ready, _, _ = select.select(listened, (), ())
        if log is not None and log in ready:
            reach.drain(log)
        if woken not in ready and plan["alive"] not in ready:
            continue
        if plan["alive"] in ready:
            os._exit(NOT_BUILT)  # No one holds its other end: the supervisor is gone.
        os.read(woken, 4096)
        _take_leave(command)


def _take_leave(command: int) -> None:
    """Wait for the processes that have ended; end with the command."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == command:
            os._exit(_exit_code(status))
        if pid == 0:
            return


def _become(plan: dict[str, Any]) -> NoReturn:
    """Turn into the command, in a session of its own, with the signals as a program finds them."""
    words = plan["command"]
    try:
        os.close(plan["alive"])
        os.setsid()
        # The kernel hands a dump to a program outside, unless the limit is exactly this.
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        if hard:
            resource.setrlimit(resource.RLIMIT_CORE, (1, hard))
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(words[0], words)
    except OSError as error:
        os.write(2, f"cannot start {words[0]}: {error.strerror}\n".encode("utf-8", "backslashreplace"))
        os._exit(_NOT_FOUND)


def _refuse(plan: dict[str, Any], error: OSError) -> NoReturn:
    meaning = _REASONS.get(error.errno or 0, "")
    _report(plan, {"error": f"{meaning}; {error.strerror}" if meaning else str(error.strerror or error)})
    os._exit(NOT_BUILT)


def _report(plan: dict[str, Any], content: dict[str, Any]) -> None:
    os.write(plan["report"], json.dumps(content).encode() + b"\n")
    os.close(plan["report"])


def _exit_code(status: int) -> int:
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
