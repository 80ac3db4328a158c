"""Where the head is, and the keys of the job: what the head passes to the other nodes over the job's own store.

One line of ASCII: ``PROTOCOL PORT SERVER-KEY CLIENT-KEY CLIENT-SECRET ADDRESS…``, in every version. Who can read the
job's store can join in the training itself, so no more is given away than was already; no one else has the keys, which
are drawn anew for each job. The same line with another client's keys, in a file beside the record, lets screens in.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ddpdoctor.errors import UsageError
from ddpdoctor.files.untrusted import read_untrusted
from ddpdoctor.record import layout

MOST_ADDRESSES = 8
_BACKLOG = 1_024
"""Connections that the system holds while those before them prove who they are."""
_PROTOCOL = re.compile(r"[0-9A-Za-z.+]{1,40}")
_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""A CURVE key in Z85."""
_ADDRESS = re.compile(r"[0-9A-Za-z.:\-_%]{1,253}")


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent needs to reach the head."""

    port: int
    server_key: str
    client_key: str
    client_secret: str
    addresses: tuple[str, ...] = ()
    """Of the head's machine, most likely to be reached first."""
    protocol: str
    """As in ``messages.PROTOCOL``."""

    def text(self) -> str:
        """Return the line that is handed out."""
        keys = (self.server_key, self.client_key, self.client_secret)
        line = " ".join((self.protocol, str(self.port), *keys, *self.addresses[:MOST_ADDRESSES]))
        return line[: layout.MOST_HEAD_BYTES]


def read_meeting(text: str) -> Meeting | None:
    """Take the message apart; None where it is not ours."""
    protocol, *words = text.split(" ")
    if len(words) < 4 or not _PROTOCOL.fullmatch(protocol) or not words[0].isdigit() or len(words[0]) > 5:
        return None
    port = int(words[0])
    if not 0 < port < 1 << 16 or not all(_KEY.fullmatch(word) for word in words[1:4]):
        return None
    return Meeting(
        port=port,
        server_key=words[1],
        client_key=words[2],
        client_secret=words[3],
        addresses=tuple(word for word in words[4 : 4 + MOST_ADDRESSES] if _ADDRESS.fullmatch(word)),
        protocol=protocol,
    )


class HeadKeys(msgspec.Struct, frozen=True, kw_only=True):
    """What a head has to be given to be the same again, for agents that know it."""

    server_secret: str
    meeting: Meeting
    screens: Meeting
    """What a screen elsewhere needs."""


def kept_keys(directory: Path) -> HeadKeys | None:
    """Return the keys of the head that this run had before; None where it had none."""
    try:
        return msgspec.json.decode(read_untrusted(directory / layout.HEAD_KEY_FILE, 1 << 16, directory), type=HeadKeys)
    except (OSError, ValueError, RecursionError):
        return None


def write_attach_file(directory: Path, screens: Meeting) -> None:
    """Keep what lets a screen in that is shown elsewhere; readable by this user alone. Raises OSError."""
    write_private(directory / layout.ATTACH_FILE, screens.text().encode("ascii") + b"\n")


def write_private(path: Path, content: bytes) -> None:
    """Write a file of a run directory at once, readable by this user alone; nothing is written through a link.

    Raises OSError.
    """
    part = path.with_suffix(".part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(part, flags, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    part.replace(path)


def own_addresses() -> tuple[str, ...]:
    """Return the addresses that other machines may reach this one by: IPv4 first, no loopback, then its name."""
    import psutil

    found: list[tuple[int, str]] = []
    for addresses in psutil.net_if_addrs().values():
        for entry in addresses:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                address = ipaddress.ip_address(entry.address.partition("%")[0])
            except ValueError:
                continue
            if not (address.is_loopback or address.is_link_local or address.is_multicast):
                found.append((address.version, str(address)))
    name = socket.gethostname()
    named = (name,) if _ADDRESS.fullmatch(name) else ()
    return (*(address for _, address in sorted(found)[: MOST_ADDRESSES - 1]), *named)


def host_and_port(text: str, option: str) -> tuple[str, int]:
    """Take ``HOST:PORT`` or ``[IPV6]:PORT`` apart; raises UsageError."""
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16 or not _ADDRESS.fullmatch(host):
        raise UsageError(f"{option} {text}: not HOST:PORT", f"Write it as in `{option} node0:29600`.")
    if ":" in host and not text.startswith("["):
        raise UsageError(f"{option} {text}: an IPv6 address needs brackets", f"Write `{option} [{host}]:{port}`.")
    return host, int(port)


def listening_sockets(host: str, port: int) -> tuple[list[socket.socket], str]:
    """Listen where the user says, at one port; the sockets, and a sentence where that is not just the address given.

    An address of this machine is the only one that is listened on. A name that stands for others (of a gateway, or of
    the machine outside of its container) or for this machine as a whole (a host name that its own hosts file calls
    127.0.1.1) is how agents find it, and no address to listen on: then it is all of them, as it is without a name.
    Raises OSError where none can be listened on.
    """
    if not host:
        return _everywhere(port), ""
    found = dict.fromkeys(
        (family, address[0]) for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )
    local = [own for own in found if _is_own(*own)]
    only_loopback = all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for _, address in local)
    if not local:
        why = f"{host} is not an address of this machine"
    elif only_loopback and not _is_loopback_name(host):
        why = f"{host} is only a loopback address on this machine"
    else:
        own: list[socket.socket] = []
        try:
            for family, address in local:
                own.append(_listening(family, str(address), port))
                port = port or int(own[0].getsockname()[1])
        except OSError:
            for one in own:
                one.close()
            raise
        return own, ""
    return _everywhere(port), f"{why}: port {port} is open on all of its addresses"


def _is_loopback_name(host: str) -> bool:
    """Return whether a user who writes this means this machine alone."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.rstrip(".").rpartition(".")[2].startswith(("localhost", "ip6-localhost", "ip6-loopback"))


def _is_own(family: int, address: object) -> bool:
    """Return whether this machine has an address: only one of its own can be bound."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as tried:
            tried.bind((address, 0))
        return True
    except OSError:
        return False


def _everywhere(port: int) -> list[socket.socket]:
    """Listen on all addresses, of both families where this machine has both."""
    try:
        return [_listening(socket.AF_INET6, "::", port)]
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES, errno.EPERM):
            raise
    return [_listening(socket.AF_INET, "0.0.0.0", port)]


def _listening(family: int, address: str, port: int) -> socket.socket:
    own = socket.socket(family, socket.SOCK_STREAM)
    try:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            own.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address != "::")
        own.bind((address, port))
        own.listen(_BACKLOG)
    except OSError:
        own.close()
        raise
    return own


def endpoint(host: str, port: int) -> str:
    """Return an address as ZeroMQ writes it."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def reach(addresses: Sequence[str], port: int, patience_s: float = 2.0) -> tuple[str, str]:
    """Return the first address that takes a connection, and why the others (or all) did not; empty where none does."""
    refused: list[str] = []
    for address in dict.fromkeys(addresses):
        try:
            with socket.create_connection((address, port), timeout=patience_s):
                return address, "; ".join(refused)
        except (OSError, UnicodeError) as error:
            reason = "no answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or str(error)
            refused.append(f"{address}: {reason}")
    return "", "; ".join(refused)
