"""The network of this machine: its interfaces, and a TCP port for a rendezvous."""

from __future__ import annotations

import random
import socket

_LOOPBACK = "127.0.0.1"
_FIRST, _TRIES = 15_000, 100
_RANGE_FILE = "/proc/sys/net/ipv4/ip_local_port_range"
_USUAL_FIRST_OF_KERNEL = 32_768


def network_interfaces() -> tuple[str, ...]:
    """Names of this machine's network interfaces; none where the system does not tell."""
    try:
        return tuple(name for _, name in socket.if_nameindex())
    except (OSError, AttributeError):
        return ()


def free_port() -> int:
    """Return a free port of the loopback interface that the kernel gives to no connection.

    Between the choice and the moment at which a launcher listens on it, any outgoing connection may take a port that
    the kernel chose: seen with several jobs that start at once (EADDRINUSE).
    """
    end = _first_of_kernel()
    for _ in range(_TRIES if end > _FIRST else 0):
        port = random.SystemRandom().randrange(_FIRST, end)
        if _is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _first_of_kernel() -> int:
    try:
        with open(_RANGE_FILE, encoding="ascii") as file:
            return int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_FIRST_OF_KERNEL


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((_LOOPBACK, port))
        except OSError:
            return False
    return True
