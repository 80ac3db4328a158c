"""How a job scales: table and plot as text, JSON for machines, and the plot as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from ddpdoctor.report.blocks import Block, Page, Plot, Said, Table, notes
from ddpdoctor.report.layout import UNKNOWN, milliseconds, percent, rate, size
from ddpdoctor.report.streams import one_line

if TYPE_CHECKING:
    from ddpdoctor.what_if.links import LinkSweep, MeasuredScaling, ScalingPoint

_MOST_EFFICIENCY = 1.2
"""Shares of a batch that fit into a cache can bring a little more than 1; more was a base run slowed by something else
(2.89 was seen beside a busy neighbour)."""
_DOUBT = (
    "N ranks are hardly more than N times as fast as one: something slowed the run on the fewest ranks (a busy "
    "machine, another number of threads); run it again on an idle one"
)
_BAR = 40
"""Columns of the bar of a perfect speed-up in the text plot."""


def page(result: MeasuredScaling) -> Page:
    """Return all that is said of the runs."""
    table = Table(
        head=("ranks", "step, ms", "samples/s", "speed-up", "efficiency", "exposed"),
        rows=tuple(map(_row, result.points)),
        figures=frozenset(range(1, 6)),
    )
    kept = [point.run.run_directory for point in result.points if point.run.run_directory]
    return Page(
        name=result.name,
        answer=_answer(result.points),
        groups=(
            [Said(text=result.name, strong=True), table],
            _plot(result),
            *([_sweep(sweep)] for sweep in result.sweeps),
            notes([*([_DOUBT] if any(map(_beyond, result.points)) else []), *result.notes]),
            [Said(text=f"Recorded in {directory}", tone="quiet") for directory in kept],
        ),
    )


def _answer(points: Sequence[ScalingPoint]) -> str:
    """Return what most ranks bring."""
    measured = [point for point in points if point.speedup is not None]
    if len(measured) < 2:
        return "too little was measured to say how it scales"
    most = measured[-1]
    if _beyond(most):
        return (
            f"{_times(most.speedup)} times as fast on {most.run.ranks} ranks as on {measured[0].run.ranks} is doubtful"
        )
    return (
        f"{_times(most.speedup)} times as fast on {most.run.ranks} ranks as on {measured[0].run.ranks}: "
        f"an efficiency of {percent(most.efficiency)}"
    )


def _beyond(point: ScalingPoint) -> bool:
    """Return whether a run gained more than its ranks can bring."""
    return (point.efficiency or 0.0) > _MOST_EFFICIENCY


def _row(point: ScalingPoint) -> tuple[str, ...]:
    run = point.run
    if run.failed:
        return (str(run.ranks), run.failed)
    return (
        str(run.ranks),
        milliseconds(run.step_ns),
        rate(run.samples_per_s),
        _times(point.speedup),
        percent(point.efficiency),
        percent(run.exposed_share),
    )


def _plot(result: MeasuredScaling) -> list[Block]:
    """Return the speed-up of each run as a bar, with a mark where it would be perfect."""
    points = [point for point in result.points if point.speedup is not None]
    if len(points) < 2:
        return []
    base, most = points[0].run.ranks, points[-1].run.ranks
    rows = [f"speed-up; | is {most / base:g} times"]
    for point in points:
        length = round(_BAR * (point.speedup or 0.0) * base / most)
        ideal = round(_BAR * point.run.ranks / most)
        bar = ("#" * min(length, _BAR + 10)).ljust(ideal)
        rows.append(f"{point.run.ranks:>5}  {bar}{'|' if length <= ideal else ''}")
    return [Plot(rows=tuple(rows), svg=as_svg(result))]


def _sweep(sweep: LinkSweep) -> Block:
    return Table(
        title=f"links of {sweep.ranks} ranks ({sweep.backend}): barrier {sweep.barrier_s * 1e3:.2f} ms",
        head=("all-reduce", "ms", "on the bus"),
        rows=tuple(
            (size(entry.bytes), milliseconds(entry.seconds * 1e9), f"{size(entry.bus_bytes_per_s)}/s")
            for entry in sweep.all_reduce
        ),
        figures=frozenset(range(3)),
    )


def as_svg(result: MeasuredScaling) -> str:
    """Return the speed-up by ranks, beside the perfect one."""
    width, height = 640, 420
    points = [point for point in result.points if point.speedup is not None]
    most = max((point.run.ranks for point in points), default=1)
    base = points[0].run.ranks if points else 1
    highest = max((point.speedup or 0.0 for point in points), default=0.0)
    highest = max(highest, most / base)
    left, bottom, top, right = 60, height - 50, 40, width - 20

    def x(ranks: float) -> float:
        return left + (right - left) * ranks / most

    def y(speedup: float) -> float:
        return bottom - (bottom - top) * speedup / highest

    line = " ".join(f"{x(point.run.ranks):.1f},{y(point.speedup or 0.0):.1f}" for point in points)
    marks = "".join(
        f'<circle cx="{x(point.run.ranks):.1f}" cy="{y(point.speedup or 0.0):.1f}" r="4" fill="#1f6feb"/>'
        f'<text x="{x(point.run.ranks):.1f}" y="{bottom + 18}" text-anchor="middle">{point.run.ranks}</text>'
        f'<text x="{x(point.run.ranks) - 6:.1f}" y="{y(point.speedup or 0.0) - 8:.1f}" text-anchor="end">'
        f"{_times(point.speedup)}</text>"
        for point in points
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="13">\n<rect width="{width}" height="{height}" fill="white"/>\n'
        f'<text x="{left}" y="22" font-weight="bold">{escape(one_line(result.name))}: speed-up by ranks</text>\n'
        f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#57606a"/>\n'
        f'<path d="M{x(0):.1f} {y(0):.1f}L{x(most):.1f} {y(most / base):.1f}" stroke="#8c959f" '
        f'stroke-dasharray="4 4"/>\n<polyline points="{line}" fill="none" stroke="#1f6feb" stroke-width="2"/>\n'
        f'{marks}\n<text x="{(left + right) / 2:.0f}" y="{height - 10}" text-anchor="middle">ranks</text>\n</svg>\n'
    )


def _times(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"
