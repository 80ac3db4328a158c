"""Serves the figures of the newest snapshot to Prometheus, from threads that nothing else waits for.

The format is the work of ``prometheus_client``: OpenMetrics for who asks for it, else the older text of Prometheus.
"""

from __future__ import annotations

import errno
import signal
import socket
import threading
from collections.abc import Iterator
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import msgspec

from ddpdoctor.errors import UsageError
from ddpdoctor.metrics.families import FAMILIES

if TYPE_CHECKING:
    from ddpdoctor.monitor.snapshot import Snapshot

LOOPBACK = "127.0.0.1"
LONGEST_S = 5.0
"""A client that says nothing for so long is let go."""
MOST_CLIENTS = 8
"""At the same time; whoever comes next is turned away at once."""
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
        self._newest: Snapshot | None = None
        self._server = _listening(wanted, self)
        self.address = Address(wanted.host, self._server.server_port)
        # A signal that is kept back in the main thread would end the process in one that does not keep it back.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            threading.Thread(target=self._server.serve_forever, name="ddpdoctor-metrics", daemon=True).start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def take(self, snapshot: Snapshot) -> None:
        """Serve this one from now on."""
        self._newest = snapshot

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of prometheus_client that a registry asks for; none before the first look."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        snapshot = self._newest
        if snapshot is None:
            return
        for family in FAMILIES:
            made = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = made(family.name, family.help, labels=family.labels, unit=family.unit)
            for labels, figure in family.samples(snapshot):
                metric.add_metric(labels, float(figure))
            yield metric


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    allow_reuse_address = True
    """A run that follows at once must not wait for old connections; a port on which someone listens stays taken."""

    def __init__(self, family: socket.AddressFamily, address: Any) -> None:
        self.address_family = family
        self._free = threading.BoundedSemaphore(MOST_CLIENTS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without asking a name server who we are, which can take half a minute."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Turn away whoever comes when enough are being served."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one client."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that send rubbish or hang up: the terminal is the job's."""


class _Handler(WSGIRequestHandler):
    timeout = LONGEST_S

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of each request."""


def _listening(wanted: Address, collector: MetricsServer) -> _Server:
    from prometheus_client import CollectorRegistry, make_wsgi_app

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    try:
        family, _, _, _, address = socket.getaddrinfo(
            wanted.host, wanted.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        server = _Server(family, address)
    except OSError as error:
        raise UsageError(f"--metrics {wanted}: {_reason(error)}", _hint(error)) from error
    server.set_app(make_wsgi_app(registry))
    return server


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
