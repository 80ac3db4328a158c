"""What of the machine is reached from inside the box: named devices and services; all others are hidden.

What is not named here has no way in, whatever program listens there: a terminal multiplexer, an editor, an agent that
holds keys, a database, a container engine would each do outside, for the script, what the box keeps it from.
"""

from __future__ import annotations

import fnmatch
import os
import re
import socket
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from . import kernel

Addresses = Mapping[str, Sequence[str]]
"""By the name of a network interface the addresses that it has."""

_DEVICES = (
    *("null", "zero", "full", "random", "urandom", "tty"),
    # GPUs: NVIDIA's (nvidia0, nvidiactl, nvidia-uvm, nvidia-caps/…), AMD's, WSL's, and what the kernel calls so.
    *("nvidia*", "kfd", "dri/renderD*", "dxg", "accel/accel*"),
)
"""Patterns of the entries of /dev that the box has; writing to them changes nothing that outlives the job."""
_OF_THE_NETWORK = ("infiniband/*",)
"""Further ones where the network is open: RDMA goes past the network namespace."""
_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
LOG_SOCKET = "/dev/log"
_DUMMY = "/sys/module/dummy"
"""Of the kernel's module: to load it may add an interface to the machine."""

_SERVICES = re.compile(
    # Who has which user id, and which name has which address: glibc, SSSD, Winbind, LDAP, systemd-userdbd ask there.
    r"(/var)?/run/(nscd/socket|nslcd/socket|samba/winbindd/pipe|systemd/userdb/[\w.]+)|/var/lib/sss/pipes/\w+|"
    # Without these CUDA finds no GPU: the daemon that keeps the driver loaded, and the one that shares a GPU.
    r"(/var)?/run/nvidia-persistenced/socket|/tmp/nvidia-mps/control"
)
"""Paths of the Unix sockets of services that answer questions and do nothing else for whoever asks."""
MOST_ENTRIES = 20_000
"""That are looked at for sockets in a file system that no overlay covers: 0.1 s."""
_ACCEPTS_CONNECTIONS = 0x10000
_CHANNELS = (stat.S_ISSOCK, stat.S_ISFIFO, stat.S_ISCHR, stat.S_ISBLK)


def served_sockets() -> tuple[str, ...]:
    """Return the paths of the Unix sockets of this network namespace that someone listens on; raises OSError."""
    with open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as file:
        lines = file.read().splitlines()[1:]
    paths: dict[str, None] = {}
    for line in lines:
        words = line.split(maxsplit=7)
        if len(words) < 8 or not words[7].startswith("/"):
            continue
        # One of datagrams, as that of the system log, listens to no one; its path is no one's but the receiver's.
        if int(words[3], 16) & _ACCEPTS_CONNECTIONS or int(words[4], 16) == socket.SOCK_DGRAM:
            # A link with a root of its own (/var/run) would lead out of the new root.
            paths[os.path.join(os.path.realpath(os.path.dirname(words[7])), os.path.basename(words[7]))] = None
    return tuple(paths)


def connect_sockets(root: str, served: Iterable[str], allowed: Iterable[str]) -> None:
    """Let those of the ``served`` that the list names, and those that the user does, be reached below the new root.

    In an overlay a socket is another file than the one that its server listens on, and reaches no one. Where no
    overlay covers one that is not allowed, it is covered itself; raises OSError where that fails.
    """
    chosen = {os.path.realpath(path) for path in allowed}
    for path in served:
        # Whoever is root may end the name service.
        if _SERVICES.fullmatch(path) and not (os.geteuid() == 0 and "/nscd/" in path):
            chosen.add(path)
        elif path not in chosen and _is_same(path, root + path):
            with suppress(FileNotFoundError):
                hide(root + path)
    for path in chosen:
        with suppress(OSError):
            if stat.S_ISSOCK(os.lstat(path).st_mode) and os.path.lexists(root + path):
                _show(path, root + path)


def _is_same(path: str, inside: str) -> bool:
    try:
        one, other = os.lstat(path), os.lstat(inside)
    except OSError:
        return False
    return stat.S_ISSOCK(one.st_mode) and (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def hide(path: str) -> None:
    """Put the empty device in the place of a socket, a pipe or a device; raises OSError."""
    _show("/dev/null", path)


def _show(path: str, inside: str) -> None:
    """Let something of the machine be used in the box, but its mode and its owner be kept; raises OSError."""
    kernel.mount(path, inside, None, kernel.BIND)
    kernel.make_read_only(inside)


def hide_channels(root: str, directory: str, *, deep: bool) -> bool:
    """Hide the sockets, pipes and devices in a directory, or all below it: read-only mounts keep no one from them.

    False where some of them may not have been seen. Raises OSError where one cannot be hidden.
    """
    left, waiting = MOST_ENTRIES, [directory]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    left -= 1
                    with suppress(FileNotFoundError):
                        mode = entry.stat(follow_symlinks=False).st_mode
                        if is_channel(mode):
                            hide(root + entry.path)
                        elif deep and stat.S_ISDIR(mode):
                            waiting.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            pass  # Whoever works there has just deleted it: it leads to nothing.
        except PermissionError:
            left = 0
        if left <= 0:
            return False
    return True


def is_channel(mode: int) -> bool:
    """Return whether a file of this mode leads to a program or a device."""
    return any(is_of(mode) for is_of in _CHANNELS)


def make_devices(root: str, *, network: bool) -> None:
    """Mount a /dev of the named devices alone, with terminals of its own; raises OSError."""
    kernel.mount("tmpfs", root, "tmpfs", kernel.NO_SUID, "size=64k,mode=755")
    for pattern in (*_DEVICES, *(_OF_THE_NETWORK if network else ())):
        for path in _matching(pattern):
            target = root + path.removeprefix("/dev")
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
            _show(path, target)
    for name, target in _LINKS.items():
        os.symlink(target, f"{root}/{name}")
    for name, kind, options in (("pts", "devpts", "newinstance,ptmxmode=666,mode=620"), ("mqueue", "mqueue", "")):
        os.mkdir(f"{root}/{name}")
        with suppress(OSError):  # a kernel without message queues
            kernel.mount(kind, f"{root}/{name}", kind, kernel.NO_SUID | kernel.NO_EXEC, options)
    os.mkdir(f"{root}/shm")


def _matching(pattern: str) -> Iterator[str]:
    """Yield the device nodes below /dev that a pattern names, and those in a directory that it names."""
    directory, _, name = f"/dev/{pattern}".rpartition("/")
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if fnmatch.fnmatchcase(entry.name, name):
                if entry.is_dir(follow_symlinks=False):
                    yield from _matching(f"{entry.path.removeprefix('/dev/')}/*")
                elif stat.S_ISCHR(entry.stat(follow_symlinks=False).st_mode):
                    yield entry.path


def name_hosts(root: str, directory: str, names: Mapping[str, str]) -> None:
    """Let names be looked up in files alone, in which this machine's own stand too; ``directory`` takes the files.

    Where no name server answers, glibc takes a name for one that may exist, and c10d warns of each connection. Raises
    OSError.
    """
    own = "".join(f"{address} {name}\n" for name, address in names.items())
    for path, changed in (("/etc/nsswitch.conf", _without_servers), ("/etc/hosts", lambda text: f"{text}\n{own}")):
        if not os.path.isfile(path):
            continue  # no glibc: musl asks servers at once
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            text = file.read()
        instead = os.path.join(directory, os.path.basename(path))
        with open(instead, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(changed(text))
        os.chmod(instead, 0o644)
        _show(instead, root + os.path.realpath(path))


def _without_servers(text: str) -> str:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("hosts:")]
    return "\n".join([*lines, "hosts: files myhostname", ""])


def open_log() -> socket.socket | None:
    """Make the box's own system log, which nobody reads; None where the machine has none."""
    with suppress(OSError):
        log = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        log.bind(LOG_SOCKET)
        os.chmod(LOG_SOCKET, 0o666)
        return log
    return None


def drain(log: socket.socket) -> None:
    """Throw away what was logged: who logs would wait where nobody takes it."""
    with suppress(OSError):
        while log.recv(1 << 16):
            pass


def make_network(interfaces: Addresses) -> None:
    """Give the network namespace that was just made the machine's interfaces by name, with nothing behind them.

    A script that listens on the machine's own address, or names an interface (``GLOO_SOCKET_IFNAME=eth0``), finds them;
    there is no route to anyone else, so that who asks is refused at once. Raises OSError.
    """
    kernel.bring_up("lo")
    for name, addresses in interfaces.items():
        holder = name if name != "lo" and os.path.isdir(_DUMMY) and _make_interface(name) else "lo"
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            packed = socket.inet_pton(family, address.partition("%")[0])
            length = 8 * len(packed)
            # Flag 2, IFA_F_NODAD: no time is spent on asking whether another machine has that address.
            body = struct.pack("=BBBBI", family, length, 2, 0, socket.if_nametoindex(holder))
            with suppress(OSError):
                kernel.ask_netlink(kernel.NEW_ADDRESS, body, ((1, packed), (2, packed)))


def _make_interface(name: str) -> bool:
    """Make an interface that leads nowhere; False where the kernel has none of that kind."""
    kind = kernel.attribute(18, kernel.attribute(1, b"dummy"))
    try:
        kernel.ask_netlink(kernel.NEW_LINK, bytes(16), ((3, name.encode() + b"\0"),), kind)
        kernel.bring_up(name)
    except OSError:
        return False
    return True
