"""How a job scales: table and plot as text, JSON for machines, and the plot as SVG."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import msgspec
from rich.text import Text

from ddpdoctor.report.escape import one_line
from ddpdoctor.report.formats.json import HEAD, indented
from ddpdoctor.report.layout import UNKNOWN, milliseconds, paragraph, percent, rate, size, spaced, to_string

if TYPE_CHECKING:
    from ddpdoctor.what_if.links import LinkSweep, MeasuredScaling, ScalingPoint

_BAR = 40
"""Columns of the bar of a perfect speed-up in the text plot."""


def render(result: MeasuredScaling, width: int, *, colour: bool) -> str:
    """Render for ``width`` columns."""
    blocks = [
        [
            Text(one_line(result.name), "bold"),
            Text(f"{'ranks':<7}{'step, ms':>10}{'samples/s':>12}{'speed-up':>10}{'efficiency':>12}{'exposed':>9}"),
            *(line for point in result.points for line in _row(point, width)),
        ],
        _plot(result),
        *(_sweep(sweep) for sweep in result.sweeps),
        [line for note in result.notes for line in paragraph(Text(one_line(note)), width, Text("note", "bold"), 6)],
        [Text(f"Recorded in {one_line(point.run.run_directory)}", "dim") for point in result.points],
    ]
    return to_string(spaced(blocks), colour=colour)


def _row(point: ScalingPoint, width: int) -> list[Text]:
    run = point.run
    if run.failed:
        return paragraph(Text(one_line(run.failed), "bold red"), width, Text(f"{run.ranks:<7}"), 7)
    return [
        Text(
            f"{run.ranks:<7}{milliseconds(run.step_ns):>10}{rate(run.samples_per_s):>12}{_times(point.speedup):>10}"
            f"{percent(point.efficiency):>12}{percent(run.exposed_share):>9}"
        )
    ]


def _plot(result: MeasuredScaling) -> list[Text]:
    """Return the speed-up of each run as a bar, with a mark where it would be perfect."""
    points = [point for point in result.points if point.speedup is not None]
    if len(points) < 2:
        return []
    base, most = points[0].run.ranks, points[-1].run.ranks
    lines = [Text(f"speed-up; | is {most / base:g} times")]
    for point in points:
        length = round(_BAR * (point.speedup or 0.0) * base / most)
        ideal = round(_BAR * point.run.ranks / most)
        bar = ("#" * min(length, _BAR + 10)).ljust(ideal) if length < ideal else "#" * min(length, _BAR + 10)
        lines.append(Text(f"{point.run.ranks:>5}  {bar}{'|' if length <= ideal else ''}"))
    return lines


def _sweep(sweep: LinkSweep) -> list[Text]:
    head = f"links of {sweep.ranks} ranks ({one_line(sweep.backend)}): barrier {sweep.barrier_s * 1e3:.2f} ms"
    lines = [Text(head, "bold"), Text(f"{'all-reduce':>12}{'ms':>10}{'on the bus':>14}")]
    for entry in sweep.all_reduce:
        took, speed = milliseconds(entry.seconds * 1e9), f"{size(entry.bus_bytes_per_s)}/s"
        lines.append(Text(f"{size(entry.bytes):>12}{took:>10}{speed:>14}"))
    return lines


def as_json(result: MeasuredScaling) -> str:
    """Render as indented JSON that ends with a line feed."""
    return indented({**HEAD, **msgspec.to_builtins(result)})


def as_svg(result: MeasuredScaling, width: int = 640, height: int = 420) -> str:
    """Return the speed-up by ranks, beside the perfect one."""
    points = [point for point in result.points if point.speedup is not None]
    most = max((point.run.ranks for point in points), default=1)
    base = points[0].run.ranks if points else 1
    left, bottom, top, right = 60, height - 50, 40, width - 20

    def x(ranks: float) -> float:
        return left + (right - left) * ranks / most

    def y(speedup: float) -> float:
        return bottom - (bottom - top) * speedup * base / most

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
