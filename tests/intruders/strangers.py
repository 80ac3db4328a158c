"""Who has no key: rubbish, half a handshake, too much of it, none at all, and far too many of each."""

from __future__ import annotations

import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

import msgspec
import zmq

from tests.intruders.attack import CLIENT_GREETING, again_and_again, dialled, first_words, many, with_keys
from tests.intruders.job import Job

Attack = Callable[[Job], Iterator[None]]
_BIG = 8 << 20


def _of(count: int, content: bytes | Callable[[], bytes]) -> Attack:
    """So many connections that send this and stay."""

    def attack(job: Job) -> Iterator[None]:
        with many(job.port, count, content if isinstance(content, bytes) else content()):
            yield

    return attack


def _random_bytes(job: Job) -> Iterator[None]:
    draw = random.Random(1)
    for _ in range(200):
        one = dialled(job.port, draw.randbytes(draw.randrange(1, 2_000)))
        if one is not None:
            one.close()
    yield


def _zmq(change: Callable[[zmq.Socket[bytes], Job], None]) -> Attack:
    """Clients of ZeroMQ that send and send."""

    def attack(job: Job) -> Iterator[None]:
        context = zmq.Context()
        try:
            for _ in range(8):
                own = context.socket(zmq.DEALER)
                own.linger = 0
                change(own, job)
                own.connect(f"tcp://127.0.0.1:{job.port}")
                with suppress(zmq.Again):
                    for _ in range(100):
                        own.send(bytes(10_000), zmq.NOBLOCK)
            time.sleep(1.0)
            yield
        finally:
            context.destroy(linger=0)

    return attack


def _plain(own: zmq.Socket[bytes], job: Job) -> None:
    own.plain_username, own.plain_password = b"root", b"root"


def _wrong_server(own: zmq.Socket[bytes], job: Job) -> None:
    own.curve_publickey, own.curve_secretkey = zmq.curve_keypair()
    own.curve_serverkey = zmq.curve_keypair()[0]


def _wrong_client(own: zmq.Socket[bytes], job: Job) -> None:
    own.curve_publickey, own.curve_secretkey = zmq.curve_keypair()
    own.curve_serverkey = job.keys.meeting.server_key.encode()


def _slow_handshakes(job: Job) -> Iterator[None]:
    with many(job.port, 100) as held:
        sent = 0

        def send() -> None:
            nonlocal sent
            for one in held:
                with suppress(OSError):
                    one.sendall(CLIENT_GREETING[sent % 64 : sent % 64 + 1])
            sent += 1
            time.sleep(0.1)

        with again_and_again(send):
            yield


def _churn(job: Job) -> Iterator[None]:
    def connect() -> None:
        socket.create_connection(("127.0.0.1", job.port), timeout=1).close()

    with again_and_again(connect, 2):
        yield


def _resets(job: Job) -> Iterator[None]:
    def reset() -> None:
        own = socket.create_connection(("127.0.0.1", job.port), timeout=1)
        own.sendall(CLIENT_GREETING[:20])
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        own.close()

    with again_and_again(reset, 2):
        yield


def _half_open(job: Job) -> Iterator[None]:
    with many(job.port, 300, CLIENT_GREETING) as held:
        for one in held:
            with suppress(OSError):
                one.shutdown(socket.SHUT_WR)
        yield


def _with_hello(count: int, more: bytes = b"") -> Attack:
    """The first words of one who knows the server's key, of many at once, and then this."""

    def attack(job: Job) -> Iterator[None]:
        with many(job.port, count, first_words(job.keys.meeting, job.port) + more):
            yield

    return attack


def _knocks(job: Job) -> Iterator[None]:
    """A right key of the server, and each time another one of a client: the guard of the keys has to look at each."""
    foreign = zmq.curve_keypair()
    stranger = msgspec.structs.replace(
        job.keys.meeting, client_key=foreign[0].decode(), client_secret=foreign[1].decode()
    )

    def knock() -> None:
        with with_keys(stranger, job.port, 20) as held:
            for one in held:
                one.send(b"x", zmq.NOBLOCK)
            time.sleep(0.3)

    with again_and_again(knock):
        yield


STRANGERS: Mapping[str, Attack] = {
    "random bytes": _random_bytes,
    "a request of HTTP": _of(100, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "a hello of TLS": _of(100, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)),
    "ZeroMQ without a key": _zmq(lambda own, job: None),
    "ZeroMQ with a password": _zmq(_plain),
    "another server's key": _zmq(_wrong_server),
    "another client's key": _zmq(_wrong_client),
    "another client's key, again and again": _knocks,
    "1,100 idle connections": _of(1_100, b""),
    "300 greetings and no more": _of(300, CLIENT_GREETING),
    "300 halves of a greeting": _of(300, CLIENT_GREETING[:11]),
    "100 unfinished frames of 8 MiB": _of(
        100, CLIENT_GREETING + b"\x06" + (_BIG - 1).to_bytes(8, "big") + b"A" * (_BIG - 100)
    ),
    "a frame of 2^40 bytes announced": _of(
        50, CLIENT_GREETING + b"\x06" + (1 << 40).to_bytes(8, "big") + b"A" * 100_000
    ),
    "a frame of 2^62 bytes announced": _of(
        50, CLIENT_GREETING + b"\x02" + (1 << 62).to_bytes(8, "big") + b"A" * 100_000
    ),
    "a HELLO of random bytes": _of(200, lambda: CLIENT_GREETING + b"\x04\xc8\x05HELLO\x01\x00" + os.urandom(192)),
    "handshakes of a byte now and then": _slow_handshakes,
    "connections that come and go": _churn,
    "connections that are reset": _resets,
    "connections that are half open": _half_open,
    "a true HELLO, again and again": _with_hello(300),
    "a true HELLO and then 8 MiB": _with_hello(50, b"\x06" + (_BIG - 1).to_bytes(8, "big") + b"A" * (_BIG - 100)),
    "a true HELLO and then rubbish": _with_hello(100, b"\x04\xff" + bytes(3_000)),
}
