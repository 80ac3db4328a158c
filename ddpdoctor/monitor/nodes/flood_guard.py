"""Cuts off peers that send far more than one message may hold: ZeroMQ bounds each frame, but not how many there are.

A message is shown once its last frame is there, and until then its frames pile up. So what each connection has brought
is read from the system, and one that has brought too much since its last message is cut off.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

LOOKED_EVERY_S = 0.25
_RECEIVED = slice(128, 136)
"""``tcpi_bytes_received`` of what Linux knows of a connection (``struct tcp_info``)."""


class FloodGuard:
    """Looks at the connections of one listening socket; used by its thread alone."""

    def __init__(self, own: zmq.Socket[bytes], most_bytes: int) -> None:
        """To be made before it listens; ``most_bytes`` is what a connection may bring beyond its last message."""
        self._own, self._most_bytes = own, most_bytes
        self.port = 0
        """Where it listens."""
        self._events = own.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._since: dict[int, int] = {}
        """By descriptor, what it had brought when its last message was seen."""
        self._receiving: set[int] = set()
        self._looks_at_s = 0.0

    def received(self, frame: zmq.Frame) -> None:
        """A message came whole, of which this is a frame."""
        with suppress(zmq.ZMQError, ValueError):
            self._receiving.add(int(frame.get("__fd")))

    def cut_off(self, now_s: float) -> int:
        """Cut off those that have brought too much; how many these were."""
        if now_s < self._looks_at_s:
            return 0
        self._looks_at_s = now_s + LOOKED_EVERY_S
        while self._events.poll(0):
            event = recv_monitor_message(self._events)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._since[event["value"]] = 0
            else:
                self._since.pop(event["value"], None)
        cut = 0
        for descriptor, before in list(self._since.items()):
            with suppress(OSError), _connection(descriptor) as connection:
                received = _received(connection)
                if descriptor in self._receiving or received < before:
                    self._since[descriptor] = received
                elif received - before > self._most_bytes and connection.getsockname()[1] == self.port:
                    connection.shutdown(socket.SHUT_RDWR)
                    del self._since[descriptor]
                    cut += 1
        self._receiving.clear()
        return cut

    def close(self) -> None:
        """Look no longer; the connections stay."""
        self._own.disable_monitor()
        self._events.close(0)


@contextmanager
def _connection(descriptor: int) -> Iterator[socket.socket]:
    """A connection of ZeroMQ's, which closes it whenever it likes, and no one else does."""
    borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _received(connection: socket.socket) -> int:
    """Return how many bytes it has brought; 0 where the system does not tell."""
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.stop)
    return int.from_bytes(told[_RECEIVED], sys.byteorder)
