"""Serves the figures of the newest snapshot to Prometheus, from a thread that waits for nobody.

A connection has a few seconds for all of its request and of the answer, however it is spread over them. The format is
the work of ``prometheus_client``: OpenMetrics for who asks for it, else the older text of Prometheus.
"""

from __future__ import annotations

import errno
import selectors
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from ddpdoctor.errors import UsageError
from ddpdoctor.metrics.families import FAMILIES
from ddpdoctor.monitor.lobby import Lobby, accepted

if TYPE_CHECKING:
    from ddpdoctor.monitor.snapshot import Snapshot

LOOPBACK = "127.0.0.1"
LONGEST_S = 5.0
"""For a request and its answer together; a snapshot of 4,096 ranks is a megabyte."""
MOST_CLIENTS = 64
"""At the same time; whoever comes next takes the place of the one that has been there longest, …"""
YOUNGEST_S = 0.02
"""… but not of one that came just now, whose request is under way."""
MOST_REQUEST_BYTES = 16 << 10
_BACKLOG = 1_024
_TICK_S = 0.2
_END = b"\r\n\r\n"
_OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
_RESPONSE = "HTTP/1.1 {}\r\n{}Content-Length: {}\r\nConnection: close\r\n\r\n"
_FORM = "Give a port, as in `--metrics 9464`, or an address of this machine and a port: `--metrics 0.0.0.0:9464`."


class Address(msgspec.Struct, frozen=True):
    """Where figures are served."""

    host: str
    port: int
    """0: any that is free."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_address(text: str) -> Address:
    """Return the address that is meant by ``9464`` (of this machine alone), ``0.0.0.0:9464`` or ``[::]:9464``.

    Raises UsageError for anything else.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise UsageError(f"--metrics {text}: an IPv6 address needs brackets", _FORM)
    if not port.isdecimal() or not port.isascii() or int(port) > 65_535 or (colon and not host):
        raise UsageError(f"--metrics {text}: not a port", _FORM)
    return Address(host or LOOPBACK, int(port))


class MetricsServer:
    """Answers on a port with the figures of the snapshot that it was given last."""

    def __init__(self, wanted: Address) -> None:
        """Listen; raises UsageError where that is not possible."""
        self.note = ""
        self.newest: Snapshot | None = None
        listening = _listening(wanted)
        self.address = Address(wanted.host, int(listening.getsockname()[1]))
        self._port = _Port(listening, self)
        self._thread = threading.Thread(target=self._port.serve, name="ddpdoctor-metrics", daemon=True)
        # A signal that is kept back in the main thread would end the process in one that does not keep it back.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def take(self, snapshot: Snapshot) -> None:
        """Serve this one from now on."""
        self.newest = snapshot

    def close(self) -> None:
        """Listen no more."""
        self._port.stop()
        self._thread.join(timeout=LONGEST_S)

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of prometheus_client that a registry asks for; none before the first look."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        snapshot = self.newest
        if snapshot is None:
            return
        for family in FAMILIES:
            made = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = made(family.name, family.help, labels=family.labels, unit=family.unit)
            for labels, figure in family.samples(snapshot):
                metric.add_metric(labels, float(figure))
            yield metric


class _Client(msgspec.Struct, eq=False):
    """One connection: what it asks for, and then what of the answer is left to send."""

    own: socket.socket
    said: bytes = b""
    answer: memoryview | None = None


class _Port:
    """Answers one request a connection, whatever others do with theirs; all by one thread, which waits for nobody."""

    def __init__(self, listening: socket.socket, collector: MetricsServer) -> None:
        from prometheus_client import CollectorRegistry, make_wsgi_app

        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        self._application: Any = make_wsgi_app(registry)
        self._collector = collector
        self._answers: dict[tuple[str, str, str, bool], bytes] = {}
        """What of the newest snapshot was asked for already."""
        self._answered_of: object = None
        self._listening = listening
        self._clients: Lobby[_Client] = Lobby(MOST_CLIENTS, MOST_CLIENTS, LONGEST_S, YOUNGEST_S)
        self._selector = selectors.DefaultSelector()
        self._is_over = threading.Event()
        self._accepts = False
        listening.setblocking(False)

    def serve(self) -> None:
        """Serve until the end is asked for; a fault costs the connection that it is met in."""
        while not self._is_over.is_set():
            now_s = time.monotonic()
            for late in self._clients.overdue(now_s):
                self._drop(late)
            if not self._accepts and self._clients.has_room(now_s):
                self._selector.register(self._listening, selectors.EVENT_READ, None)
                self._accepts = True
            for key, events in self._selector.select(_TICK_S):
                if key.data is None:
                    self._accept()
                else:
                    self._attend(key.data, events)
        for client in self._clients.all():
            self._drop(client)
        self._selector.close()
        self._listening.close()

    def stop(self) -> None:
        """Have it end, soon."""
        self._is_over.set()

    def _accept(self) -> None:
        now_s = time.monotonic()
        try:
            if self._clients.has_room(now_s):
                for own, source in accepted(self._listening, 16):
                    client = _Client(own)
                    self._selector.register(own, selectors.EVENT_READ, client)
                    gone = self._clients.add(client, source, now_s)
                    if gone is not None:
                        self._drop(gone)
                return
        except OSError:
            pass  # There are no descriptors just now.
        self._selector.unregister(self._listening)
        self._accepts = False

    def _attend(self, client: _Client, events: int) -> None:
        try:
            if client.answer is None:
                content = client.own.recv(MOST_REQUEST_BYTES)
                client.said += content
                if not content:
                    self._drop(client)
                elif _END in client.said or len(client.said) > MOST_REQUEST_BYTES:
                    client.answer = memoryview(self._answer(client.said))
                    self._selector.modify(client.own, selectors.EVENT_WRITE, client)
                    self._send(client, client.answer)
            elif events & selectors.EVENT_WRITE:
                self._send(client, client.answer)
            else:
                # What comes after a request is thrown away, so that the end of the answer is not lost by it.
                self._discard(client)
        except BlockingIOError:
            return
        except Exception:  # Who sends rubbish or hangs up is told nothing: the terminal is the job's.
            self._drop(client)

    def _send(self, client: _Client, answer: memoryview) -> None:
        client.answer = answer[client.own.send(answer) :]
        if not client.answer:
            client.own.shutdown(socket.SHUT_WR)
            self._selector.modify(client.own, selectors.EVENT_READ, client)

    def _discard(self, client: _Client) -> None:
        if not client.own.recv(MOST_REQUEST_BYTES):
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        self._clients.remove(client)
        if client.own.fileno() >= 0:
            self._selector.unregister(client.own)
            client.own.close()

    def _answer(self, said: bytes) -> bytes:
        if _END not in said:
            return _RESPONSE.format("431 Request Header Fields Too Large", "", 0).encode()
        lines = said.partition(_END)[0].decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
            return _RESPONSE.format("400 Bad Request", "", 0).encode()
        fields = {name.lower(): value for name, _, value in (line.partition(":") for line in lines[1:])}
        method = words[0] if words[0] in ("GET", "OPTIONS") else "other"
        path = "/favicon.ico" if words[1] == "/favicon.ico" else "/metrics"
        # In one of a few forms each, so that a snapshot is written out a few times however often it is asked for.
        accepts = _OPEN_METRICS if "application/openmetrics-text" in fields.get("accept", "") else "text/plain"
        asked = method, path, accepts, "gzip" in fields.get("accept-encoding", "")
        newest = self._collector.newest
        if newest is not self._answered_of:
            self._answers.clear()
            self._answered_of = newest
        if asked not in self._answers:
            self._answers[asked] = self._made(*asked)
        return self._answers[asked]

    def _made(self, method: str, path: str, accepts: str, is_packed: bool) -> bytes:
        status = ""
        head: list[tuple[str, str]] = []

        def start(given: str, fields: list[tuple[str, str]]) -> None:
            nonlocal status
            status = given
            head.extend(fields)

        asked = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": "", "HTTP_ACCEPT": accepts}
        content = b"".join(self._application({**asked, "HTTP_ACCEPT_ENCODING": "gzip" if is_packed else ""}, start))
        fields = "".join(f"{name}: {value}\r\n" for name, value in head)
        return _RESPONSE.format(status, fields, len(content)).encode() + content


def _listening(wanted: Address) -> socket.socket:
    own = None
    try:
        family, _, _, _, address = socket.getaddrinfo(
            wanted.host, wanted.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        own = socket.socket(family, socket.SOCK_STREAM)
        # A run that follows at once must not wait for old connections; a port on which someone listens stays taken.
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind(address)
        own.listen(_BACKLOG)
    except OSError as error:
        if own is not None:
            own.close()
        raise UsageError(f"--metrics {wanted}: {_reason(error)}", _hint(error)) from error
    return own


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "that name does not resolve"
    if error.errno == errno.EADDRINUSE:
        return "the port is used by another program"
    if error.errno == errno.EADDRNOTAVAIL:
        return "this machine does not have that address"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "you are not permitted to listen on that port"
    return error.strerror or str(error)


def _hint(error: OSError) -> str:
    if error.errno in (errno.EADDRINUSE, errno.EACCES, errno.EPERM):
        return "Give another port; each watched job on a machine needs its own port, above 1023."
    return _FORM
