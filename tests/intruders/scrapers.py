"""Who comes to the port of the metrics, and lets it wait, sends far too much, or asks without a pause."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

from tests.intruders.attack import again_and_again, dialled, many
from tests.intruders.job import Job
from tests.intruders.strangers import Attack

_REQUEST = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"


def _slow(count: int) -> Attack:
    """Requests of a byte a second."""

    def attack(job: Job) -> Iterator[None]:
        with many(job.metrics, count, _REQUEST + b"X: ") as held:

            def send() -> None:
                for at, one in enumerate(held):
                    try:
                        one.sendall(b"a")
                    except OSError:
                        again = dialled(job.metrics, _REQUEST, patience_s=0.2)
                        if again is not None:
                            one.close()
                            held[at] = again
                time.sleep(1.0)

            with again_and_again(send):
                yield

    return attack


def _of(count: int, content: bytes) -> Attack:
    def attack(job: Job) -> Iterator[None]:
        with many(job.metrics, count, content):
            yield

    return attack


def _slow_readers(job: Job) -> Iterator[None]:
    held = []
    for _ in range(200):
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        own.settimeout(0.5)
        with suppress(OSError):
            own.connect(("127.0.0.1", job.metrics))
            own.sendall(_REQUEST + b"\r\n")
        held.append(own)
    yield
    for own in held:
        own.close()


def _flood(job: Job) -> Iterator[None]:
    def scrape() -> None:
        with socket.create_connection(("127.0.0.1", job.metrics), timeout=1) as own:
            own.sendall(_REQUEST + b"\r\n")
            while own.recv(65_536):
                pass

    with again_and_again(scrape, 4):
        yield


def _churn(job: Job) -> Iterator[None]:
    with again_and_again(lambda: socket.create_connection(("127.0.0.1", job.metrics), timeout=1).close(), 2):
        yield


def _half_open(job: Job) -> Iterator[None]:
    with many(job.metrics, 200, _REQUEST) as held:
        for one in held:
            with suppress(OSError):
                one.shutdown(socket.SHUT_WR)
        yield


SCRAPERS: Mapping[str, Attack] = {
    "metrics: 8 slow requests": _slow(8),
    "metrics: 64 slow requests": _slow(64),
    "metrics: 500 slow requests": _slow(500),
    "metrics: 1,100 idle connections": _of(1_100, b""),
    "metrics: 200 slow readers": _slow_readers,
    "metrics: a header of 1 MB": _of(20, _REQUEST + b"X: " + b"a" * 1_000_000),
    "metrics: a million lines of headers": _of(5, _REQUEST + b"a: b\r\n" * 200_000),
    "metrics: 1,000 requests at once": _of(20, (_REQUEST + b"\r\n") * 1_000),
    "metrics: methods that there are not": _of(50, b"BREW /coffee HTTP/1.1\r\n\r\n"),
    "metrics: requests that are none": _of(50, random.Random(4).randbytes(3_000) + b"\r\n\r\n"),
    "metrics: 50 MB to a POST": _of(4, b"POST / HTTP/1.1\r\nContent-Length: 50000000\r\n\r\n" + bytes(50_000_000)),
    "metrics: a scrape after the other": _flood,
    "metrics: connections that come and go": _churn,
    "metrics: connections that are half open": _half_open,
}
