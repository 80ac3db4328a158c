"""Serves the figures of the newest snapshot to Prometheus, from a thread that waits for nobody.

A connection has a few seconds for all of its request and of the answer, however it is spread over them. The format is
the work of ``prometheus_client`` (OpenMetrics for who asks for it, else the older text of Prometheus), HTTP that of the
standard library.
"""

from __future__ import annotations

import errno
import io
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Literal, get_args
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import msgspec

from ddpdoctor import __version__
from ddpdoctor.diagnosis.performance.summary import Phases, Traffic, VerdictState
from ddpdoctor.errors import UsageError
from ddpdoctor.launch.processes import without_signals
from ddpdoctor.monitor.snapshot import RankView, RunState, Snapshot
from ddpdoctor.record.streams.measured import Gpu, GpuSample

if TYPE_CHECKING:
    from ddpdoctor.monitor.snapshot import Snapshot

# The figures that are served, each with its name, its unit and where a snapshot holds it; pure.

MetricSample = tuple[tuple[str, ...], float]
"""Values of the labels, and the figure."""
_SECOND_NS = 1e9
_GPU_FRESH_NS = 15_000_000_000
"""An older sample says nothing of a GPU now: the driver has stopped to answer."""
_MOST_RANKS_BY_PHASE = 512
"""Of 4,096 ranks the phases alone were 32,768 samples, which take the most of a second to write."""
_UNITS = frozenset({"seconds", "ratio", "bytes", "celsius", "watts", "hertz"})
"""Base units of Prometheus; a name ends with its own."""
_OF_A_RANK = ("rank", "host")
_OF_A_GPU = ("gpu", "uuid", "ranks")


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One name under which figures are served."""

    name: str
    """As Prometheus stores it, with the unit, and ``_total`` where it only grows."""
    help: str
    """One sentence."""
    samples: Callable[[Snapshot], Iterator[MetricSample]]
    kind: Literal["gauge", "counter"] = "gauge"
    unit: str = ""
    """A base unit of Prometheus; empty for a count and for 0 or 1."""
    labels: tuple[str, ...] = ()


def _run(snapshot: Snapshot) -> Iterator[MetricSample]:
    run = (snapshot.name, snapshot.run_directory, snapshot.backend, snapshot.device, snapshot.torch_version)
    yield (*run, __version__), 1


def _state(snapshot: Snapshot) -> Iterator[MetricSample]:
    yield from (((state,), state == snapshot.state) for state in get_args(RunState))


def _verdict(snapshot: Snapshot) -> Iterator[MetricSample]:
    yield from (((state,), state == snapshot.verdict.state) for state in get_args(VerdictState))


def _findings(snapshot: Snapshot) -> Iterator[MetricSample]:
    holding = [view.finding for view in snapshot.findings if view.until_ns is None]
    told = {
        (finding.code, finding.name, finding.severity.value, str(finding.ranks[0]) if len(finding.ranks) == 1 else "")
        for finding in holding
    }
    yield from ((labels, 1) for labels in sorted(told))


def _hang(snapshot: Snapshot) -> Iterator[MetricSample]:
    yield (), snapshot.stall is not None and snapshot.stall.proved


def _standstill(snapshot: Snapshot) -> Iterator[MetricSample]:
    yield (), 0 if snapshot.stall is None else max(0, snapshot.now_ns - snapshot.stall.since_ns) / _SECOND_NS


def _hang_culprits(snapshot: Snapshot) -> Iterator[MetricSample]:
    sides = snapshot.stall.sides if snapshot.stall is not None else ()
    hosts = {rank.rank: rank.host for rank in snapshot.ranks}
    culprits = sorted(rank for side in sides if side.culprit for rank in side.ranks)
    yield from (((str(rank), hosts.get(rank, "")), 1) for rank in culprits)


def _wait_for_rank(snapshot: Snapshot) -> Iterator[MetricSample]:
    wait = snapshot.wait
    if wait is not None:
        hosts = {rank.rank: rank.host for rank in snapshot.ranks}
        waited_s = max(0, snapshot.now_ns - wait.since_ns) / _SECOND_NS
        yield (str(wait.late), hosts.get(wait.late, "")), waited_s


def _phases(snapshot: Snapshot) -> Iterator[MetricSample]:
    if snapshot.phases is not None:
        yield from (((name,), seconds) for name, seconds in _phase_seconds(snapshot.phases))


def _rank_phases(snapshot: Snapshot) -> Iterator[MetricSample]:
    if len(snapshot.ranks) > _MOST_RANKS_BY_PHASE:
        return
    for rank in snapshot.ranks:
        if rank.phases is not None:
            labels = (str(rank.rank), rank.host)
            yield from (((*labels, name), seconds) for name, seconds in _phase_seconds(rank.phases))


def _phase_seconds(phases: Phases) -> Iterator[tuple[str, float]]:
    """Yield the phases that were measured; together they are the step."""
    yield from ((name, ns / _SECOND_NS) for name, ns in phases.parts_ns().items() if ns is not None)


def _throttled(snapshot: Snapshot) -> Iterator[MetricSample]:
    for gpu, sample in _newest(snapshot):
        yield from (((*_gpu_labels(gpu), reason), 1) for reason in sample.throttle_reasons)


def _gpu_memory(snapshot: Snapshot) -> Iterator[MetricSample]:
    yield from ((_gpu_labels(gpu), float(gpu.memory_total_bytes)) for gpu in snapshot.gpus if gpu.memory_total_bytes)


def _job(name: str, help: str, value: Callable[[Snapshot], float | None]) -> Family:
    """One figure of the whole job; in nanoseconds where its unit is the second."""

    def samples(snapshot: Snapshot) -> Iterator[MetricSample]:
        figure = value(snapshot)
        if figure is not None:
            yield (), figure * _scale(name)

    return _family(name, help, samples)


def _ranks(name: str, help: str, value: Callable[[RankView], float | None]) -> Family:
    """One figure of each rank; in nanoseconds where its unit is the second."""

    def samples(snapshot: Snapshot) -> Iterator[MetricSample]:
        for rank in snapshot.ranks:
            figure = value(rank)
            if figure is not None:
                yield (str(rank.rank), rank.host), figure * _scale(name)

    return _family(name, help, samples, _OF_A_RANK)


def _scale(name: str) -> float:
    return 1 / _SECOND_NS if name.endswith("_seconds") else 1


def _gpus(name: str, help: str, value: Callable[[GpuSample], float | None], scale: float = 1) -> Family:
    """Return one figure of each GPU with a fresh sample of the driver."""

    def samples(snapshot: Snapshot) -> Iterator[MetricSample]:
        for gpu, sample in _newest(snapshot):
            figure = value(sample)
            if figure is not None:
                yield _gpu_labels(gpu), figure * scale

    return _family(name, help, samples, _OF_A_GPU)


def _traffic(
    name: str, help: str, value: Callable[[Traffic], float | None], together: Callable[[list[float]], float]
) -> Family:
    """One figure of each kind of communication; that of several groups of the same ranks is made ``together``.

    Of two samples with the same labels Prometheus refuses all that is served.
    """

    def samples(snapshot: Snapshot) -> Iterator[MetricSample]:
        found: dict[tuple[str, ...], list[float]] = {}
        for traffic in snapshot.traffic:
            figure = value(traffic)
            if figure is not None:
                found.setdefault((traffic.group, traffic.kind, traffic.backend), []).append(figure)
        yield from ((labels, together(figures)) for labels, figures in found.items())

    return _family(name, help, samples, ("group", "kind", "backend"))


def _newest(snapshot: Snapshot) -> Iterator[tuple[Gpu, GpuSample]]:
    for gpu in snapshot.gpus:
        if gpu.samples and snapshot.now_ns - gpu.samples[-1].taken_at_ns < _GPU_FRESH_NS:
            yield gpu, gpu.samples[-1]


def _gpu_labels(gpu: Gpu) -> tuple[str, ...]:
    return str(gpu.index), gpu.uuid, ",".join(map(str, gpu.ranks))


def _family(
    name: str,
    help: str,
    samples: Callable[[Snapshot], Iterator[MetricSample]],
    labels: Sequence[str] = (),
) -> Family:
    last = name.rpartition("_")[2]
    kind: Literal["gauge", "counter"] = "counter" if last == "total" else "gauge"
    unit = last if last in _UNITS else ""
    return Family(name=f"ddpdoctor_{name}", help=help, samples=samples, kind=kind, unit=unit, labels=tuple(labels))


FAMILIES = (
    _family(
        "run_info",
        "The watched job; always 1",
        _run,
        ("run", "run_directory", "backend", "device", "torch_version", "version"),
    ),
    _family("run_state", "1 for the current state of the run, 0 for the others", _state, ("state",)),
    _family("verdict", "1 for the current verdict, 0 for the others", _verdict, ("verdict",)),
    _family(
        "finding",
        "1 for each current finding; rank is set if it names a single rank",
        _findings,
        ("code", "name", "severity", "rank"),
    ),
    _family("hang", "1 when the job is proved to hang", _hang),
    _family("hang_culprit", "1 for each rank that causes a stall", _hang_culprits, _OF_A_RANK),
    _family("standstill_seconds", "How long the ranks have been stalled; 0 while they run", _standstill),
    _family("wait_seconds", "How long ranks have waited for this busy rank", _wait_for_rank, _OF_A_RANK),
    _job(
        "step_overdue_seconds",
        "For how long some rank has completed no step although one is overdue; else 0",
        lambda snapshot: snapshot.overdue_ns or 0,
    ),
    _job("ranks_expected", "Ranks of the job", lambda snapshot: snapshot.world_size),
    _job("ranks_seen", "Ranks that this monitor sees", lambda snapshot: len(snapshot.ranks)),
    _job("steps_total", "Steps that every rank has made", lambda snapshot: snapshot.steps),
    _job(
        "step_median_seconds",
        "Median of the newest step times of all ranks",
        lambda snapshot: None if snapshot.step_times is None else snapshot.step_times.p50_ns,
    ),
    _job(
        "step_p95_seconds",
        "95% of the newest steps were shorter",
        lambda snapshot: None if snapshot.step_times is None else snapshot.step_times.p95_ns,
    ),
    _family("phase_seconds", "Mean per step over the ranks; the phases add up to it", _phases, ("phase",)),
    _job("samples_per_second", "Throughput of the job", lambda snapshot: snapshot.samples_per_s),
    _job(
        "exposed_communication_ratio",
        "Share of the step in which nothing hides the reduction of gradients",
        lambda snapshot: snapshot.exposed_share,
    ),
    _job(
        "overlap_ratio",
        "Share of the communication window that computation hides",
        lambda snapshot: snapshot.overlap_ratio,
    ),
    _job(
        "efficiency_ratio",
        "Estimated: what is left of the step without exposed and explicit communication",
        lambda snapshot: snapshot.efficiency,
    ),
    _traffic(
        "traffic_bytes_per_step",
        "Bytes that a rank passes to communication of this kind, in all groups of these ranks",
        lambda traffic: traffic.bytes_per_step,
        sum,
    ),
    _traffic(
        "bus_bandwidth_bytes_per_second",
        "A lower bound of the bus bandwidth, the highest of groups of the same ranks",
        lambda traffic: traffic.bus_bandwidth_bytes_per_s,
        max,
    ),
    _job(
        "last_step_timestamp_seconds",
        "End of the newest step behind these figures",
        lambda snapshot: snapshot.measured_at_ns,
    ),
    _job("last_look_timestamp_seconds", "When ddpdoctor last looked at the job", lambda snapshot: snapshot.now_ns),
    _ranks("rank_alive", "1 while the rank's process runs", lambda rank: rank.alive),
    _ranks(
        "rank_failed",
        "1 when the rank's process has failed: by an exception, a signal, or an exit code other than 0",
        lambda rank: rank.failed,
    ),
    _ranks("rank_steps_total", "Steps of the rank", lambda rank: rank.step),
    _ranks("rank_step_median_seconds", "Median step time of the newest steps", lambda rank: rank.median_ns),
    _family("rank_phase_seconds", "Mean per step; omitted beyond 512 ranks", _rank_phases, (*_OF_A_RANK, "phase")),
    _ranks("rank_waiting_seconds", "Mean per step that the rank waits for others", lambda rank: rank.waiting_ns),
    _ranks("rank_late_seconds", "Mean per step that the others wait for this rank alone", lambda rank: rank.late_ns),
    _gpus(
        "gpu_utilisation_ratio",
        "As NVML reports it; a GPU that spins in a communication kernel reads 1",
        lambda sample: sample.utilisation_percent,
        0.01,
    ),
    _gpus("gpu_memory_used_bytes", "Memory in use", lambda sample: sample.memory_used_bytes),
    _family("gpu_memory_bytes", "Memory of the GPU", _gpu_memory, _OF_A_GPU),
    _gpus("gpu_temperature_celsius", "Temperature of the GPU", lambda sample: sample.temperature_c),
    _gpus("gpu_power_watts", "Power that it draws", lambda sample: sample.power_w),
    _gpus("gpu_sm_clock_hertz", "Clock of its multiprocessors", lambda sample: sample.sm_clock_mhz, 1e6),
    _family("gpu_throttled", "1 for each reason why it is throttled now", _throttled, (*_OF_A_GPU, "reason")),
    _gpus("gpu_ecc_errors_total", "Uncorrected errors since the driver was loaded", lambda sample: sample.ecc_errors),
    _gpus("gpu_lost", "1 when the driver can no longer reach it", lambda sample: sample.lost),
)
"""Every name, in the order in which they are served."""


LOOPBACK = "127.0.0.1"
LONGEST_S = 5.0
"""For a request and its answer together; a snapshot of 4,096 ranks is a megabyte."""
MOST_CLIENTS = 64
"""At the same time; whoever comes next takes the place of the one that has been there longest, …"""
YOUNGEST_S = 0.02
"""… but not of one that came just now, whose request is under way."""
MOST_REQUEST_BYTES = 16 << 10
_TICK_S = 0.2
_END = b"\r\n\r\n"
_OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
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
        self._port = _listening(wanted)
        self._port.set_app(self._answer)
        self.address = Address(wanted.host, int(self._port.server_address[1]))
        self._answers: dict[tuple[str, str, str, bool], tuple[str, list[tuple[str, str]], bytes]] = {}
        """What of the newest snapshot was asked for already."""
        self._answered_of: object = None
        self._lock = threading.Lock()
        self._application = _application(self)
        self._thread = threading.Thread(
            target=self._port.serve_forever, args=(_TICK_S,), name="ddpdoctor-metrics", daemon=True
        )
        with without_signals():
            self._thread.start()

    def take(self, snapshot: Snapshot) -> None:
        """Serve this one from now on."""
        self.newest = snapshot

    def close(self) -> None:
        """Listen no more."""
        self._port.shutdown()
        self._port.server_close()

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

    def _answer(self, asked: dict[str, Any], start: Callable[[str, list[tuple[str, str]]], Any]) -> Iterable[bytes]:
        """Answer as a WSGI application, each form of a snapshot written out once however often it is asked for."""
        accepts = _OPEN_METRICS if "application/openmetrics-text" in asked.get("HTTP_ACCEPT", "") else "text/plain"
        method = asked["REQUEST_METHOD"] if asked["REQUEST_METHOD"] in ("GET", "OPTIONS") else "other"
        path = "/favicon.ico" if asked["PATH_INFO"] == "/favicon.ico" else "/metrics"
        form = method, path, accepts, "gzip" in asked.get("HTTP_ACCEPT_ENCODING", "")
        with self._lock:
            if self.newest is not self._answered_of:
                self._answers.clear()
                self._answered_of = self.newest
            if form not in self._answers:
                self._answers[form] = self._made(*form)
            status, head, content = self._answers[form]
        start(status, [*head, ("Content-Length", str(len(content)))])
        return [content]

    def _made(self, method: str, path: str, accepts: str, packed: bool) -> tuple[str, list[tuple[str, str]], bytes]:
        told: list[Any] = []
        asked = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": "", "HTTP_ACCEPT": accepts}
        asked["HTTP_ACCEPT_ENCODING"] = "gzip" if packed else ""
        content = b"".join(self._application(asked, lambda *given: told.extend(given)))
        return told[0], told[1], content


def _application(collector: MetricsServer) -> Any:
    from prometheus_client import CollectorRegistry, make_wsgi_app

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return make_wsgi_app(registry)


class _Request(WSGIRequestHandler):
    """One request, of which no more than a few kilobytes are read; what is longer, or no request, is not answered."""

    def setup(self) -> None:
        """Read the head of the request."""
        super().setup()
        said = b""
        while _END not in said and len(said) <= MOST_REQUEST_BYTES and (piece := self.connection.recv(4_096)):
            said += piece
        self.rfile = io.BytesIO(said if _END in said else b"")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing: the terminal is the job's."""


class _Port(ThreadingMixIn, WSGIServer):
    """A thread for each connection, of which there are few, none for long."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1_024

    def __init__(self, family: int, address: Any) -> None:
        self.address_family = family
        self.held: dict[socket.socket, float] = {}
        """Since when each connection is there, the oldest first."""
        super().__init__(address, _Request)

    def server_bind(self) -> None:
        """Bind without a look-up of the machine's name, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; where there are no descriptors just now it waits for a while."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(_TICK_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve it, in the place of the oldest connection if there are many."""
        if len(self.held) >= MOST_CLIENTS:
            oldest, since_s = next(iter(self.held.items()))
            time.sleep(max(0.0, since_s + YOUNGEST_S - time.monotonic()))
            self._hang_up(oldest)
        self.held[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Hang up on those whose time is over."""
        for request, since_s in list(self.held.items()):
            if time.monotonic() - since_s > LONGEST_S:
                self._hang_up(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that was served."""
        self.held.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing to who sends rubbish or hangs up."""

    def _hang_up(self, request: socket.socket) -> None:
        self.held.pop(request, None)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


def _listening(wanted: Address) -> _Port:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            wanted.host, wanted.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return _Port(family, address)
    except OSError as error:
        raise UsageError(f"--metrics {wanted}: {_reason(error)}", _hint(error)) from error


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
