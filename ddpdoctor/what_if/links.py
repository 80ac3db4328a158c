"""What an all-reduce costs: latency and bytes over bandwidth, in a ring or a tree, within a node and between nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

import msgspec

from ddpdoctor.what_if.settings import Gradients, ready_shares

# What runs of one job on several numbers of ranks amount to: speed-up, efficiency, and what the links carry.


class ScalingRun(msgspec.Struct, frozen=True, kw_only=True):
    """The job on one number of ranks. None: not measured."""

    ranks: int
    run_directory: str = ""
    failed: str = ""
    """Why nothing was measured; empty where something was."""
    steps: int = 0
    step_ns: float | None = None
    samples_per_s: float | None = None
    exposed_share: float | None = None


class AllReduce(msgspec.Struct, frozen=True, kw_only=True):
    """All-reduces of one size."""

    bytes: int
    seconds: float
    bus_bytes_per_s: float
    """2 (N - 1) / N bytes for each byte: what a ring sends over each link."""


class LinkSweep(msgspec.Struct, frozen=True, kw_only=True):
    """The links between so many ranks."""

    ranks: int
    backend: str
    barrier_s: float
    all_reduce: tuple[AllReduce, ...] = ()


class ScalingPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A run against the one on the fewest ranks."""

    run: ScalingRun
    speedup: float | None = None
    efficiency: float | None = None
    """Speed-up for each rank more; 1 is perfect."""


class MeasuredScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How a job scales on this machine."""

    name: str
    points: tuple[ScalingPoint, ...]
    """By number of ranks."""
    sweeps: tuple[LinkSweep, ...] = ()
    notes: tuple[str, ...] = ()


def points_of(runs: Sequence[ScalingRun]) -> tuple[ScalingPoint, ...]:
    """Put each run beside the one on the fewest ranks of which something was measured.

    By samples a second; by steps, where nothing tells the samples.
    """
    measured = sorted((run for run in runs if not run.failed), key=lambda run: run.ranks)
    by_samples = all(run.samples_per_s for run in measured)

    def rate(run: ScalingRun) -> float | None:
        if by_samples:
            return run.samples_per_s
        # With as many samples to a rank's step, whatever their number.
        return None if not run.step_ns else run.ranks / run.step_ns

    base = measured[0] if measured else None
    base_rate = rate(base) if base is not None else None
    points = []
    for run in sorted(runs, key=lambda run: run.ranks):
        own = None if run.failed else rate(run)
        speedup = own / base_rate if own and base_rate else None
        efficiency = None if speedup is None or base is None else speedup * base.ranks / run.ranks
        points.append(ScalingPoint(run=run, speedup=speedup, efficiency=efficiency))
    return tuple(points)


_LATENCY_NS = {"gloo": 500_000.0, "nccl": 30_000.0}
"""Of a small all-reduce, where the run has none: gloo through loopback took 0.2 to 1 ms on 2 to 4 ranks
(``ddpdoctor scaling``); NVIDIA's nccl-tests show 10 to 50 µs within a node."""
_OTHER_LATENCY_NS = 100_000.0
_MOST_BYTES_PER_S = 4e12
"""Beyond twice what NVLink 5 carries to one GPU (1.8 TB/s) the fit found that the bytes cost nothing, not a speed."""
UNSURE = 6.0
"""So many times the assumed latency is possible, too."""
SMALL_BYTES = 65_536
"""An all-reduce up to this size is latency."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """An all-reduce of ``b`` bytes among ``ranks`` takes ``latency_ns + b * ns_per_byte``."""

    latency_ns: float
    ns_per_byte: float
    ranks: int

    def all_reduce_ns(self, size_bytes: float) -> float:
        """Return how long one bucket is on its way."""
        return self.latency_ns + size_bytes * self.ns_per_byte

    @property
    def bytes_per_s(self) -> float:
        """What a link carries in one direction, if it is a ring: each byte passes it 2 (N - 1) / N times."""
        return 2 * (self.ranks - 1) / self.ranks / self.ns_per_byte * 1e9 if self.ns_per_byte else math.inf


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of an all-reduce by the run, and its extremes where the run does not show all."""

    best: Link
    likely: tuple[Link, ...]
    """``best`` first; the others share the same time out among latency and bandwidth in another way."""
    ground: str
    """A sentence on where the figures come from."""
    splits: bool
    """The run's own calls tell latency and bandwidth apart."""


class Arrival(msgspec.Struct, frozen=True):
    """One reduction of gradients, as the rank saw it that came last."""

    lead_ns: float
    """From its first bucket launched to its last gradient ready."""
    exposed_ns: float


class Call(msgspec.Struct, frozen=True):
    """An explicit all-reduce: how long the last rank that came was held in it."""

    size_bytes: int
    held_ns: float


def fit(
    arrivals: Sequence[Arrival],
    gradients: Gradients,
    calls: Sequence[Call],
    ranks: int,
    backend: str,
) -> Fit:
    """Fit the cost of an all-reduce to the reductions of gradients, and its latency to small explicit ones.

    The bandwidth is the one with which the replay exposes as much as was seen, in the median over the steps.
    """
    small = [call.held_ns for call in calls if call.size_bytes <= SMALL_BYTES]
    small_ns = median(small) if len(small) >= 5 else None
    name = next((known for known in _LATENCY_NS if known in backend), "")
    assumed_ns = small_ns if small_ns is not None else _LATENCY_NS.get(name, _OTHER_LATENCY_NS)
    layout_bytes = gradients.layout_bytes
    shares = ready_shares(layout_bytes, layout_bytes)
    if gradients.unused_map_bytes:
        layout_bytes, shares = (*layout_bytes, gradients.unused_map_bytes), (*shares, 0.0)

    def error(latency_ns: float, per_byte: float) -> float:
        """By how much the replay exposes more than was seen, in the median."""
        tried = Link(latency_ns=latency_ns, ns_per_byte=per_byte, ranks=2)
        return median(exposed_ns(a.lead_ns, layout_bytes, shares, tried) - a.exposed_ns for a in arrivals)

    # What explains all that was exposed, if bytes cost nothing.
    most_ns = _root(lambda latency_ns: error(latency_ns, 0.0))

    def link(latency_ns: float) -> Link:
        latency_ns = min(latency_ns, most_ns)
        per_byte = _root(lambda per_byte: error(latency_ns, per_byte), scale=1.0 / max(1, sum(layout_bytes)))
        return Link(latency_ns=latency_ns, ns_per_byte=per_byte, ranks=ranks)

    best = link(assumed_ns)
    if small_ns is not None:
        spread = (link(0.5 * small_ns), link(2.0 * small_ns))
        ground = f"latency of {small_ns / 1e6:.2f} ms from {len(small)} small all-reduces of the run"
    else:
        spread = (link(0.0), link(UNSURE * assumed_ns))
        ground = (
            f"the run has no small all-reduce, so latency ({best.latency_ns / 1e6:.2f} ms taken) and bandwidth cannot "
            "be separated, and the intervals are wider"
        )
    told = best.bytes_per_s <= _MOST_BYTES_PER_S
    speed = f"bandwidth of {best.bytes_per_s / 1e6:,.0f} MB/s from what was exposed" if told else ""
    ground = f"{ground}; {speed}" if speed else f"{ground}; the bytes themselves have no measurable cost"
    return Fit(best=best, likely=(best, *spread), ground=ground, splits=small_ns is not None)


def exposed_ns(lead_ns: float, layout_bytes: Sequence[int], shares: Sequence[float], link: Link) -> float:
    """Return what of the communication of one rank's buckets comes after its last gradient, all others being there."""
    done_ns = -math.inf
    for size_bytes, share in zip(layout_bytes, shares, strict=True):
        done_ns = max(done_ns, -lead_ns * share) + link.all_reduce_ns(size_bytes)
    return max(0.0, done_ns)


def on_other_ranks(
    link: Link,
    seen_nodes: int,
    ranks: int,
    nodes: int,
    between_bytes_per_s: float | None = None,
    between_latency_ns: float | None = None,
) -> Link:
    """Return the cost among another number of ranks, on nodes with as many each.

    A ring takes 2 (N - 1) hops of latency and passes each byte 2 (N - 1) / N times over the slowest link; a tree takes
    2 log2 N hops and passes it twice. The cheaper one for small messages decides the latency, the ring the bandwidth
    (Thakur, Rabenseifner, Gropp 2005). Between nodes a link of its own counts, by default the run's where it has some.
    """
    if ranks < 2:
        return Link(latency_ns=0.0, ns_per_byte=0.0, ranks=1)
    hop_ns = link.latency_ns / _hops(link.ranks)
    wire_ns = link.ns_per_byte * link.ranks / (2 * (link.ranks - 1))
    latency_ns, slowest_ns = hop_ns * _hops(ranks), wire_ns
    if nodes > 1 and seen_nodes < 2:
        if between_bytes_per_s is not None:
            slowest_ns = max(slowest_ns, 1e9 / between_bytes_per_s)
        if between_latency_ns is not None:
            latency_ns = hop_ns * _hops(max(2, ranks // nodes)) + between_latency_ns * _hops(nodes)
    return Link(latency_ns=latency_ns, ns_per_byte=slowest_ns * 2 * (ranks - 1) / ranks, ranks=ranks)


def _hops(ranks: int) -> float:
    """Hops of latency of the ring or the tree, whichever has fewer."""
    return min(2.0 * (ranks - 1), 2.0 * math.ceil(math.log2(ranks))) if ranks > 1 else 1.0


def _root(error: Callable[[float], float], scale: float = 1.0) -> float:
    """Return where a growing function passes 0, by bisection; 0 where it is above 0 from the beginning."""
    if error(0.0) >= 0:
        return 0.0
    high = 1e6 * scale
    while error(high) < 0 and high < 1e15 * scale:
        high *= 4
    low = 0.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if error(middle) < 0 else (low, middle)
    return (low + high) / 2
