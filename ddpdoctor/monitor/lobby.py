"""Connections that have not proved anything yet: few at once, for a short time, and none keeps the others out.

Whoever listens puts each accepted connection here until it has said what it has to. Where the lobby is full the source
that has most connections in it loses its oldest one, so that one stranger makes room for others and not they for it.
"""

from __future__ import annotations

import ipaddress
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_NETWORK_BITS = 64
"""Of an IPv6 address: whoever has one address of such a network has all of them."""


class Lobby(Generic[T]):
    """Used by one thread alone."""

    def __init__(self, most: int, most_of_one: int, patience_s: float, youngest_s: float) -> None:
        """Hold ``most`` connections at once and ``most_of_one`` of one source, each for ``patience_s``.

        One that is younger than ``youngest_s`` is never turned out for another: that long an honest one gets.
        """
        self._most, self._most_of_one = most, most_of_one
        self._patience_s, self._youngest_s = patience_s, youngest_s
        self._held: dict[T, tuple[str, float]] = {}
        self._sources: Counter[str] = Counter()

    def all(self) -> list[T]:
        """Return those that are in it, the oldest first."""
        return list(self._held)

    def has_room(self, now_s: float) -> bool:
        """Return whether another connection may be accepted: one is old enough to be turned out where it is full."""
        return len(self._held) < self._most or now_s - next(iter(self._held.values()))[1] >= self._youngest_s

    def add(self, one: T, source: str, now_s: float) -> T | None:
        """Take in a connection, or give it time anew; the one that has to go for it, which may be it itself."""
        self.remove(one)
        self._held[one] = source, now_s
        self._sources[source] += 1
        if self._sources[source] > self._most_of_one:
            return self._oldest_of(source)
        if len(self._held) > self._most:
            return self._oldest_of(self._sources.most_common(1)[0][0])
        return None

    def remove(self, one: T) -> None:
        """Forget a connection: it is closed, or needs no lobby any more."""
        held = self._held.pop(one, None)
        if held is not None:
            self._sources[held[0]] -= 1
            if not self._sources[held[0]]:
                del self._sources[held[0]]

    def overdue(self, now_s: float) -> Iterator[T]:
        """Yield the connections whose time is over; the first were taken in first."""
        for one, (_, since_s) in list(self._held.items()):
            if now_s - since_s < self._patience_s:
                return
            yield one

    def _oldest_of(self, source: str) -> T:
        return next(one for one, (of, _) in self._held.items() if of == source)


def source_of(address: Any) -> str:
    """Return who a connection is from: the address of a socket without its port, of IPv6 the network."""
    try:
        host = ipaddress.ip_address(str(address[0]).partition("%")[0])
    except (ValueError, IndexError, TypeError):
        return ""
    if isinstance(host, ipaddress.IPv6Address):
        mapped = host.ipv4_mapped
        return str(mapped or ipaddress.ip_network((int(host), 128)).supernet(new_prefix=_NETWORK_BITS))
    return str(host)


def accepted(listening: socket.socket, most: int = 64) -> Iterator[tuple[socket.socket, str]]:
    """Yield the connections that wait to be accepted, and who each is from; raises OSError where none can be."""
    for _ in range(most):
        try:
            connection, address = listening.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return
        connection.setblocking(False)
        yield connection, source_of(address)
