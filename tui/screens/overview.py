"""The first page: what is wrong, the vital signs, where a step goes, the findings, the ranks."""

from __future__ import annotations

from ddpdoctor.monitor.snapshot import RankView, Snapshot
from ddpdoctor.tui.draw.cells import EMPTY, Cell, Line, Painting, beside, cut, line, padded, paragraph, shown, stacked
from ddpdoctor.tui.draw.charts import (
    ceiling_of,
    gauge,
    heat_of,
    heat_strip,
    newest,
    phase_lines,
    sparkline,
    spread,
)
from ddpdoctor.tui.draw.figures import duration, percent, share, span, three
from ddpdoctor.tui.screens.sections import aged_heading, as_fresh, finding_line, heading, verdict_lines
from ddpdoctor.tui.view import View

EXPOSED_SCALE = 0.5
"""Share at the right end of the gauge."""
SIDE_BY_SIDE = 96
"""Columns from which figures and chart stand beside each other."""
FIGURES_WIDTH = 60
NOTES = 3


def paint_overview(view: View, width: int, height: int) -> Painting:
    """Draw the page; what matters most is drawn first, so that a small terminal loses the rest."""
    tall = height >= 30
    lines = [EMPTY] if height >= 26 else []
    lines += verdict_lines(view, width, most=6 if tall else 4)
    lines += [EMPTY] if height >= 26 else []
    lines += vital_signs(view, width, chart_height=6 + max(0, min(6, (height - 36) // 2)))
    lines += [EMPTY] if tall else []
    lines += step_phases(view, width)
    findings = _findings(view, width, most=max(1, (height - len(lines)) // 3) if tall else 3)
    findings += _notes(view, width)
    left = height - len(lines) - len(findings)
    ranks = _ranks(view, width, left - (2 if tall else 0))
    lines += [EMPTY] if tall else []
    return stacked(height, lines, findings, [EMPTY] if tall and ranks else [], ranks)


def vital_signs(view: View, width: int, chart_height: int) -> list[Line]:
    """Speed, step times, communication and GPUs, with the step time's course."""
    snapshot = view.snapshot
    wide = width >= SIDE_BY_SIDE
    figures = _figures(view, FIGURES_WIDTH if wide else width)
    head = aged_heading("Vital signs", view, snapshot.measured_at_ns, width)
    if not wide:
        course = step_course(view, width)
        figures.insert(2, course)
        return [head, *as_fresh(figures, view, snapshot.measured_at_ns)]
    chart = step_chart(view, width - FIGURES_WIDTH - 3, chart_height)
    return [head, *as_fresh(beside(figures, chart, FIGURES_WIDTH, 3), view, snapshot.measured_at_ns)]


def _figures(view: View, width: int) -> list[Line]:
    snapshot, glyphs = view.snapshot, view.glyphs
    times = snapshot.step_times
    exposed, limit = snapshot.exposed_share, snapshot.exposed_limit
    role = "phase.other" if exposed is None else "good" if exposed <= limit else "warning"
    bar = max(8, min(24, width - 50))
    verdict = "" if exposed is None else "within" if exposed <= limit else "above"
    lines = [
        _pair("speed", three(snapshot.steps_per_s), "steps/s", three(snapshot.samples_per_s), "samples/s"),
        _pair(
            "step time",
            duration(times.p50_ns if times else None),
            "median",
            duration(times.p95_ns if times else None),
            "p95",
        ),
        line(
            *_figure("exposed", share(exposed), "of the step  "),
            *gauge(
                None if exposed is None else exposed / EXPOSED_SCALE, bar, glyphs, role, min(1.0, limit / EXPOSED_SCALE)
            ),
            Cell(f"  {verdict} {limit:.0%}" if verdict else "", role),
        ),
        _pair("overlap", share(snapshot.overlap_ratio), "hidden", share(snapshot.efficiency), "efficiency"),
    ]
    if snapshot.gpus or snapshot.gpu_utilisation_percent is not None:
        lines.append(
            _pair(
                "GPUs",
                percent(snapshot.gpu_utilisation_percent),
                "busy",
                percent(snapshot.gpu_utilisation_corrected_percent),
                "at work",
            )
        )
    else:
        note = shown(snapshot.gpus_note or "no GPU figures")
        lines.append(line(Cell("  GPUs         ", "dim"), Cell(cut(note, width - 15, glyphs.dots), "dim")))
    return lines


def _figure(name: str, value: str, unit: str) -> Line:
    return line(Cell(f"  {name:<11}", "dim"), Cell(f"{value:>9}", "strong"), Cell(f" {unit}", "dim"))


def _pair(name: str, first: str, first_unit: str, second: str, second_unit: str) -> Line:
    return line(
        *_figure(name, first, f"{first_unit:<9}"), Cell(f"{second:>9}", "strong"), Cell(f" {second_unit}", "dim")
    )


def step_course(view: View, width: int) -> Line:
    """Return the course of the median step time on one line."""
    values = newest(view.snapshot.history.step_p50_ns, width - 15)
    high, _ = ceiling_of(values, ())
    return line(Cell("  its course  ", "dim"), *sparkline(values, width - 15, view.glyphs, high))


def step_chart(view: View, width: int, height: int) -> list[Line]:
    """Return the course of the median step time, with its scale at the left and its span below."""
    history, glyphs = view.snapshot.history, view.glyphs
    labels = 8
    columns = width - labels - 2
    high, beyond = ceiling_of(newest(history.step_p50_ns, columns), newest(history.step_p95_ns, columns))
    rows = spread(history.step_p50_ns, history.step_p95_ns, columns, height - 1, glyphs, high)
    measured = any(value is not None for value in history.step_p50_ns)
    lines: list[Line] = []
    for number, cells in enumerate(rows):
        label = "" if not measured else duration(high) if number == 0 else "0" if number == len(rows) - 1 else ""
        lines.append(line(Cell(padded(label, labels, "right"), "dim"), Cell(f" {glyphs.bar_between}", "faint"), *cells))
    reach = _reach(view.snapshot, columns)
    caption = f"step time, median and p95{reach}" + (f", up to {duration(beyond)}" if beyond is not None else "")
    lines.append(line(" " * (labels + 2), Cell(cut(caption, columns, glyphs.dots), "dim")))
    return lines


def _reach(snapshot: Snapshot, columns: int) -> str:
    at_ns = snapshot.history.slices_at_ns[-columns:]
    return f", last {span((snapshot.ended_at_ns or snapshot.now_ns) - at_ns[0])}" if len(at_ns) > 1 else ""


def step_phases(view: View, width: int) -> list[Line]:
    """Return where the time of a step goes: one bar and its legend."""
    snapshot = view.snapshot
    phases = snapshot.phases
    remark = "" if phases is None else f"{duration(phases.step_ns)}, mean of all ranks"
    head = aged_heading("Where a step goes", view, snapshot.measured_at_ns, width, remark)
    if phases is None:
        return [head, line(Cell("  no step measured yet", "dim"))]
    lines = phase_lines(phases, width, view.glyphs, view.coloured)
    return [head, *as_fresh(lines, view, snapshot.measured_at_ns)]


def _findings(view: View, width: int, most: int) -> list[Line]:
    """Those that hold; what is over is on a page of its own."""
    holding = [found for found in view.snapshot.findings if found.until_ns is None]
    remark = "" if not holding else "press 5 for what to do"
    head = heading(f"Findings ({len(holding)})" if holding else "Findings", width, view.glyphs, remark)
    if not holding and view.snapshot.verdict.state == "unknown" and view.snapshot.state != "ended":
        return [head, line(Cell(f"  {view.glyphs.advice} nothing found yet", "dim"))]
    if not holding:
        return [head, line(Cell(f"  {view.glyphs.good} ", "good"), Cell("nothing found", "dim"))]
    lines = [finding_line(found, view, width) for found in holding[:most]]
    if len(holding) > most:
        lines[-1] = line(Cell(f"    and {len(holding) - most + 1} more", "dim"))
    return [head, *lines]


def _notes(view: View, width: int) -> list[Line]:
    """Return what could not be measured or read."""
    label = Cell(f"  {view.glyphs.advice} not seen   ", "dim")
    return [cells for note in view.snapshot.notes[:NOTES] for cells in paragraph(note, width - 2, "dim", label, most=2)]


def _ranks(view: View, width: int, room: int) -> list[Line]:
    """One line a rank: what it does now, how late it comes. The latest first when there is no room for all."""
    ranks = view.snapshot.ranks
    if room < 3 or not ranks:
        return []
    shown_ranks = list(ranks)
    if len(ranks) > room - 1:
        shown_ranks.sort(key=lambda rank: (not rank.culprit, -_heat_now(rank), rank.rank))
        shown_ranks = shown_ranks[: room - 2]
    digits = max(len(str(rank.rank)) for rank in ranks)
    state_width = min(40, max(24, width // 3))
    strip = width - digits - state_width - 14
    lines = [heading("Ranks", width, view.glyphs, "how late each is, over time")]
    for rank in shown_ranks:
        role = "bad" if rank.culprit else "" if rank.alive else "dim"
        sign = view.glyphs.culprit if rank.culprit else " "
        cells = line(
            Cell(f"  rank {rank.rank:>{digits}} {sign} ", role or "dim"),
            Cell(padded(shown(rank.state), state_width, dots=view.glyphs.dots), role),
            "  ",
            *heat_strip(rank.lateness_ns, rank.median_ns, strip, view.glyphs),
        )
        lines += as_fresh([cells], view, rank.beat_at_ns or rank.measured_at_ns) if rank.alive else [cells]
    if len(ranks) > len(shown_ranks):
        lines.append(line(Cell(f"  and {len(ranks) - len(shown_ranks)} more ranks", "dim")))
    return lines


def _heat_now(rank: RankView) -> int:
    """Return how late a rank comes now, in the steps of the strip: the order of ranks must not flicker."""
    late = rank.lateness_ns[-1] if rank.lateness_ns else None
    return heat_of(late, rank.median_ns) or 0
