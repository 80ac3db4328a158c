"""What the attacks are made of: connections, keys of ZeroMQ, and threads that send for as long as an attack holds."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import zmq

from ddpdoctor.monitor.nodes.front import FIRST_BYTES, GREETING
from ddpdoctor.monitor.nodes.meeting import Meeting, endpoint
from ddpdoctor.monitor.nodes.messages import MOST_BYTES, connected

CLIENT_GREETING = GREETING[:32] + bytes(32)


def dialled(port: int, content: bytes = b"", *, patience_s: float = 1.0) -> socket.socket | None:
    """A connection that has sent as much of this as it was let; None where there was none to be had."""
    own = socket.socket()
    own.settimeout(patience_s)
    try:
        own.connect(("127.0.0.1", port))
        own.sendall(content)
    except ConnectionError:
        pass
    except TimeoutError:
        if not content:
            own.close()
            return None
    return own


@contextmanager
def many(port: int, count: int, content: bytes = b"") -> Iterator[list[socket.socket]]:
    """So many connections, each with this sent, which stay."""
    held: list[socket.socket] = []
    try:
        for _ in range(count):
            one = dialled(port, content, patience_s=0.2)
            if one is not None:
                held.append(one)
        yield held
    finally:
        for one in held:
            one.close()


@contextmanager
def again_and_again(do: Callable[[], None], threads: int = 1) -> Iterator[None]:
    """Do something in threads for as long as the attack holds, whatever comes of it."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            with suppress(OSError, zmq.ZMQError):
                do()

    running = [threading.Thread(target=run, daemon=True) for _ in range(threads)]
    for thread in running:
        thread.start()
    over.wait(1.0)  # It is under way.
    try:
        yield
    finally:
        over.set()
        for thread in running:
            thread.join(30)


@contextmanager
def with_keys(meeting: Meeting, port: int, count: int = 1) -> Iterator[list[zmq.Socket[bytes]]]:
    """Connections with a key of the job."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4_096)
    try:
        where = endpoint("127.0.0.1", port)
        held = [connected(context, meeting, where, MOST_BYTES, immediate=False) for _ in range(count)]
        yield held
    finally:
        context.destroy(linger=0)


def first_words(meeting: Meeting, port: int) -> bytes:
    """Return what a client with a key says first: its greeting and its HELLO."""
    said = b""
    with socket.create_server(("127.0.0.1", 0)) as between, with_keys(meeting, between.getsockname()[1]):
        near, _ = between.accept()
        near.settimeout(10)
        with near:
            near.sendall(GREETING)
            while len(said) < FIRST_BYTES and (content := near.recv(FIRST_BYTES - len(said))):
                said += content
    return said


@contextmanager
def held_back(port: int, most_bytes: int) -> Iterator[int]:
    """A port that leads to another one, and brings no more than so many bytes of each connection there."""
    over = threading.Event()
    ends: list[socket.socket] = []

    def carry(one: socket.socket, other: socket.socket, left: int) -> None:
        with suppress(OSError):
            while not over.is_set() and left > 0 and (content := one.recv(min(left, 65_536))):
                other.sendall(content)
                left -= len(content)

    def accept() -> None:
        with suppress(OSError):
            while True:
                near, _ = between.accept()
                far = socket.create_connection(("127.0.0.1", port))
                ends.extend((near, far))
                threading.Thread(target=carry, args=(near, far, most_bytes), daemon=True).start()
                threading.Thread(target=carry, args=(far, near, 1 << 40), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=512) as between:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield between.getsockname()[1]
        finally:
            over.set()
            between.shutdown(socket.SHUT_RDWR)
            for one in ends:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
