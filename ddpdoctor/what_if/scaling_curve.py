"""How a job scales: throughput and efficiency by number of ranks, and what limits it at each."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.what_if.predict import Model, Outcome
from ddpdoctor.what_if.prediction import Curve, Interval, Point
from ddpdoctor.what_if.settings import Scaling, Settings

DOUBLINGS = 4
"""The curve goes to so many times twice the ranks of the run."""
_CLEAR = 0.02


def curves(model: Model) -> Iterator[Curve]:
    """Yield weak and strong scaling, from one rank on, on as many nodes as the run reports."""
    for kind in ("weak", "strong"):
        points = [point for ranks in _numbers(model) if (point := _point(model, ranks, kind)) is not None]
        yield Curve(kind=kind, points=tuple(points), serial=_serial(model) if kind == "strong" else "")


def _numbers(model: Model) -> list[int]:
    """Return the numbers of ranks: doubled from those of the run, on one node no further than four times as many."""
    seen = len(model.observed.ranks)
    doublings = DOUBLINGS if model.observed.nodes > 1 else 2
    less = [seen >> shift for shift in range(1, seen.bit_length()) if not seen % (1 << shift)]
    return sorted({1, *less, *(seen << shift for shift in range(doublings + 1))})


def _point(model: Model, ranks: int, kind: Scaling) -> Point | None:
    observed = model.observed
    per_node = max(1, len(observed.ranks) // observed.nodes)
    nodes = max(1, -(-ranks // per_node)) if observed.nodes > 1 else 1
    one = Settings(ranks=1, nodes=1, scaling=kind, straggler="none")
    try:
        outcome = model.outcome(one if ranks == 1 else Settings(ranks=ranks, nodes=nodes, scaling=kind))
        alone = model.outcome(one)
    except DdpDoctorError:
        return None
    step, samples = outcome.step_ns, outcome.samples
    ideal = alone.speedup.value * ranks or 1.0
    return Point(
        ranks=ranks,
        nodes=nodes,
        step_ns=step,
        samples_per_s=Interval(samples / step.value * 1e9, samples / step.high * 1e9, samples / step.low * 1e9)
        if samples and step.low
        else None,
        efficiency=Interval(
            *(value / ideal for value in (outcome.speedup.value, outcome.speedup.low, outcome.speedup.high))
        ),
        limit=_limit(model, outcome, ranks),
    )


def _limit(model: Model, outcome: Outcome, ranks: int) -> str:
    """Return what takes most of the step beside computing."""
    step_ns = outcome.best.mean_ns
    made = outcome.scenario
    sent_ns = sum(made.bucket_ns) * made.synchronised
    latency_ns = outcome.best.transfer_ns
    parts = {"data": outcome.best.data_ns, "slowest rank": fmean(outcome.best.waiting_ns)}
    if sent_ns or made.before_ns or made.after_ns:
        link = model.observed.fit.best
        of_latency = link.latency_ns * len(made.bucket_ns) * made.synchronised / sent_ns if sent_ns else 1.0
        parts["latency" if of_latency > 0.5 else "bandwidth"] = latency_ns
    name, cost_ns = max(parts.items(), key=lambda entry: entry[1])
    return name if cost_ns > _CLEAR * step_ns else "computation"


def _serial(model: Model) -> str:
    """Return what of a rank's own step does not shrink with its batch, and the most that follows from it."""
    ranks = model.observed.ranks
    fixed = fmean(fmean(times.optimizer) + fmean(times.other) for times in ranks)
    shrinking = fmean(fmean(times.data_wait) + fmean(times.forward) + fmean(times.backward) for times in ranks)
    share = fixed / (fixed + shrinking) if fixed + shrinking else 0.0
    if share < 0.001:
        return "nothing of a rank's own step stays when its batch shrinks, as far as the run shows"
    stays = f"{share:.1%} of a rank's own step (optimizer and code between the phases) stays when its batch shrinks"
    if share > 0.95:
        return f"{stays}: more ranks hardly make one batch faster"
    most = f"{1 / share:,.0f}" if share < 0.1 else f"{1 / share:.1f}"
    return f"{stays}: one batch is trained at most {most} times as fast as by one rank, however many there are (Amdahl)"
