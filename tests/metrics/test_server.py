"""The port: what cannot be served is said before the job starts, and no client is in the way of another."""

from __future__ import annotations

import random
import re
import signal
import socket
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from ddpdoctor import metrics as metrics_server
from ddpdoctor.errors import UsageError
from ddpdoctor.metrics import Address, MetricsServer, read_address
from tests.demo.job import demo_snapshot

STARTED_NS = 1_700_000_000_000_000_000


def _fetch(server: MetricsServer) -> str:
    with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=30) as response:
        return str(response.read().decode())


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:9464", ("0.0.0.0", 9464)),
        ("[::]:80", ("::", 80)),
        ("node-a:9464", ("node-a", 9464)),
    ],
)
def test_an_address_is_read(text: str, address: tuple[str, int]) -> None:
    found = read_address(text)
    assert (found.host, found.port) == address
    assert str(read_address(str(found))) == str(found)


@pytest.mark.parametrize("text", ["", "x", "-1", "65536", ":9464", "::1:9464", "a:b", "٣", "1.5"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--metrics"):
        read_address(text)


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(UsageError, match="the port is used by another program"):
            MetricsServer(Address("127.0.0.1", other.getsockname()[1]))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UsageError, match="this machine does not have that address"):
        MetricsServer(Address("192.0.2.1", 9464))


def test_before_the_first_look_there_is_nothing_and_afterwards_the_port_is_free() -> None:
    server = MetricsServer(Address("127.0.0.1", 0))
    assert "ddpdoctor_" not in _fetch(server)
    server.take(demo_snapshot(1_000_000_000, STARTED_NS))
    assert "ddpdoctor_rank_alive" in _fetch(server)
    server.close()
    MetricsServer(server.address).close()


def test_no_thread_of_the_server_takes_a_signal_that_the_main_thread_keeps_back() -> None:
    server = MetricsServer(Address("127.0.0.1", 0))
    try:
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "ddpdoctor-metrics"]
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        (blocked,) = re.findall(r"^SigBlk:\s*(\w+)$", status, re.MULTILINE)
        for number in (signal.SIGALRM, signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1):
            assert int(blocked, 16) >> (number - 1) & 1, number
    finally:
        server.close()


def _slow(server: MetricsServer, count: int) -> list[socket.socket]:
    """Clients that have begun a request and do not end it."""
    held = [socket.create_connection((server.address.host, server.address.port), timeout=30) for _ in range(count)]
    for client in held:
        client.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
    return held


@pytest.mark.parametrize("count", [8, 64, 300])
def test_slow_clients_make_room_for_a_scrape(count: int) -> None:
    server = MetricsServer(Address("127.0.0.1", 0))
    server.take(demo_snapshot(1_000_000_000, STARTED_NS))
    slow = _slow(server, count)
    try:
        assert "ddpdoctor_rank_alive" in _fetch(server)
        assert len(server._port.held) <= metrics_server.MOST_CLIENTS
    finally:
        for client in slow:
            client.close()
        server.close()


def test_a_request_has_a_time_limit_however_it_is_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "LONGEST_S", 0.5)
    server = MetricsServer(Address("127.0.0.1", 0))
    (slow,) = _slow(server, 1)
    slow.settimeout(0.05)
    try:
        deadline = time.monotonic() + 30
        while True:  # A byte now and then prolongs nothing.
            assert time.monotonic() < deadline
            try:
                slow.sendall(b"a")
                if not slow.recv(1):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
    finally:
        slow.close()
        server.close()


def _answered(server: MetricsServer, request: bytes) -> bytes:
    with socket.create_connection((server.address.host, server.address.port), timeout=30) as client:
        client.sendall(request)
        return b"".join(iter(lambda: client.recv(65_536), b""))


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", b"HTTP/1.0 200 OK\r\n"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.0 405 Method Not Allowed\r\n"),
        (b"what is this\r\n\r\n", b"<!DOCTYPE HTML>\n"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000, b""),
    ],
)
def test_each_request_is_answered_in_its_way(request_: bytes, status: bytes) -> None:
    server = MetricsServer(Address("127.0.0.1", 0))
    try:
        answer = _answered(server, request_)
        assert answer.startswith(status) and bool(answer) == bool(status)
    finally:
        server.close()


def test_a_snapshot_is_written_out_once_for_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    server = MetricsServer(Address("127.0.0.1", 0))
    server.take(demo_snapshot(1_000_000_000, STARTED_NS))
    try:
        packed = _answered(server, b"GET / HTTP/1.1\r\nAccept-Encoding: gzip\r\n\r\n")
        assert b"Content-Encoding: gzip" in packed
        opened = _answered(server, b"GET / HTTP/1.1\r\naccept: application/openmetrics-text;q=0.5\r\n\r\n")
        assert opened.endswith(b"# EOF\n")
        monkeypatch.setattr(server, "collect", lambda: 1 / 0)
        again = _answered(server, b"GET / HTTP/1.1\r\nAccept-Encoding: gzip\r\n\r\n")
        # The head has the second of the answer.
        assert again.partition(b"\r\n\r\n")[2] == packed.partition(b"\r\n\r\n")[2]
    finally:
        server.close()


def test_rubbish_and_silent_clients_keep_nobody_out(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics_server, "LONGEST_S", 0.2)
    server = MetricsServer(Address("127.0.0.1", 0))
    server.take(demo_snapshot(1_000_000_000, STARTED_NS))
    draw = random.Random(1)
    silent = []
    try:
        for _ in range(100):
            with socket.create_connection((server.address.host, server.address.port), timeout=30) as client:
                # Whoever is turned away at once has nobody to write to.
                try:
                    client.sendall(draw.randbytes(draw.randrange(1, 2000)) + b"\r\n\r\n")
                except OSError:
                    continue
        silent = [socket.create_connection((server.address.host, server.address.port)) for _ in range(50)]
        deadline = time.monotonic() + 30
        while True:  # They are let go of after the time-out.
            try:
                assert "ddpdoctor_rank_alive" in _fetch(server)
                break
            except OSError:
                assert time.monotonic() < deadline, "the figures cannot be fetched any more"
    finally:
        for client in silent:
            client.close()
        server.close()
    assert capfd.readouterr() == ("", "")
