"""The page of one rank: what it does, where its step goes, its GPU, its stack, its last collectives."""

from __future__ import annotations

from ddpdoctor.monitor.snapshot import CallView, RankView
from ddpdoctor.tui.draw.cells import EMPTY, Cell, Line, Painting, beside, cut, line, shown, stacked
from ddpdoctor.tui.draw.charts import flowing, heat_strip, phase_lines
from ddpdoctor.tui.draw.figures import count, degrees, duration, megahertz, memory, percent, size, span, three, watts
from ddpdoctor.tui.screens.sections import aged_heading, as_fresh, heading, stack_lines
from ddpdoctor.tui.view import View

SIDE_BY_SIDE = 96
CALLS = 12
PHASE_OF = {"data_wait": "data wait", "explicit": "explicit collectives", "other": "own code"}
"""The phases of a step as people call them, where that is another word."""


def paint_rank(view: View, width: int, height: int) -> Painting:
    """Draw the rank that was opened."""
    rank = view.rank(view.opened)
    if rank is None:
        return stacked(height, [line(Cell(f"  rank {shown(view.opened)} is no longer in this run", "dim"))])
    parts = [_now(rank, view, width), _steps(rank, view, width)]
    if rank.gauges:
        parts.append(_gauges(rank, view, width))
    half = (width - 3) // 2 if width >= SIDE_BY_SIDE else width
    stack, calls = _stack(rank, view, half), _calls(rank, view, half)
    parts.append(beside(stack, calls, half, 3) if width >= SIDE_BY_SIDE else [*stack, EMPTY, *calls])
    lines: list[Line] = []
    for part in parts:
        lines += [*([EMPTY] if lines else []), *part]
    return stacked(height, lines)


def _now(rank: RankView, view: View, width: int) -> list[Line]:
    words = [f"process {rank.pid}"] if rank.pid is not None else []
    words += [f"on {shown(rank.host)}"] if rank.host else []
    words += [f"node {rank.node}"] if rank.node is not None else []
    words += [f"GPU {rank.gpu_index}"] if rank.gpu_index is not None else []
    since = "" if rank.state_since_ns is None else f" for {span(view.snapshot.now_ns - rank.state_since_ns)}"
    role = "bad" if rank.culprit else "strong"
    lines = [
        heading(f"Rank {rank.rank}", width, view.glyphs, ", ".join(words)),
        line(Cell("  now        ", "dim"), Cell(shown(rank.state), role), Cell(since if rank.alive else "", "dim")),
    ]
    if rank.culprit:
        lines.append(line("             ", Cell("the others wait for this rank", "bad")))
    if rank.where is not None:
        place = view.place(rank.where.file, rank.where.line)
        lines.append(line(Cell("  at         ", "dim"), Cell(cut(place, width - 14, view.glyphs.dots), "code")))
    lines.append(_gpu(rank, view))
    return [cells for cells in lines if cells]


def _gpu(rank: RankView, view: View) -> Line:
    gpu = next((gpu for gpu in view.snapshot.gpus if rank.rank in gpu.ranks), None)
    if gpu is None or not gpu.samples:
        return EMPTY
    sample = gpu.samples[-1]
    throttled = ", ".join(shown(reason) for reason in sample.throttle_reasons)
    words = (
        f"{percent(sample.utilisation_percent)} busy, {memory(sample.memory_used_bytes)}, {watts(sample.power_w)}, "
        f"{degrees(sample.temperature_c)}, {megahertz(sample.sm_clock_mhz)}"
    )
    return line(Cell("  GPU        ", "dim"), words, Cell(f", {throttled}" if throttled else "", "warning"))


def _steps(rank: RankView, view: View, width: int) -> list[Line]:
    head = aged_heading("Where its step goes", view, rank.measured_at_ns, width)
    times = rank.step_times
    if rank.phases is None or times is None:
        return [head, line(Cell("  no step measured yet", "dim"))]
    figures = [
        ("step", count(rank.step)),
        ("median", duration(times.p50_ns)),
        ("p95", duration(times.p95_ns)),
        ("waits for others", duration(rank.waiting_ns)),
        ("samples/s", three(rank.samples_per_s)),
    ]
    if rank.late_ns:
        what = PHASE_OF.get(rank.late_phase, rank.late_phase)
        figures.append(("others wait for it", duration(rank.late_ns) + (f" by its {what}" if what else "")))
    entries: list[Line] = [(Cell(f"{name} ", "dim"), Cell(value, "strong")) for name, value in figures]
    strip = heat_strip(rank.lateness_ns, times.p50_ns, width - 15, view.glyphs)
    lines = [
        *flowing(entries, width),
        *phase_lines(rank.phases, width, view.glyphs, view.coloured),
        line(Cell("  lateness   ", "dim"), *strip),
    ]
    return [head, *as_fresh(lines, view, rank.measured_at_ns)]


def _gauges(rank: RankView, view: View, width: int) -> list[Line]:
    """Draw the further figures, a step each."""
    written = {"ns": duration, "bytes": size, "count": three}
    entries: list[Line] = [
        (Cell(f"{shown(gauge.name)} ", "dim"), Cell(written[gauge.unit](gauge.per_step), "strong"))
        for gauge in rank.gauges
    ]
    head = aged_heading("Further figures, a step", view, rank.measured_at_ns, width)
    return [head, *as_fresh(flowing(entries, width), view, rank.measured_at_ns)]


def _stack(rank: RankView, view: View, width: int) -> list[Line]:
    taken = rank.stack_taken_at_ns
    remark = "" if taken is None else f"taken {span(view.snapshot.now_ns - taken)} ago"
    head = heading("Stack, innermost first", width, view.glyphs, remark)
    if not rank.stack:
        return [head, line(Cell("  t takes it" if view.lives else "  not taken in this run", "dim"))]
    return [head, *(line("  ", *cells) for cells in stack_lines(rank.stack, width - 2, view))]


def _calls(rank: RankView, view: View, width: int) -> list[Line]:
    head = heading("Its last collectives", width, view.glyphs, "newest first")
    if not rank.calls:
        return [head, line(Cell("  none other than DDP's", "dim"))]
    lines = [_call(call, view, width) for call in reversed(rank.calls[-CALLS:])]
    return [head, *lines]


def _call(call: CallView, view: View, width: int) -> Line:
    inside = call.left_at_ns == 0
    took = (view.snapshot.now_ns if inside else call.left_at_ns) - call.entered_at_ns
    room = max(20, width - 42)
    name = cut(f"{shown(call.kind)} #{call.sequence:,}", room, view.glyphs.dots)
    return line(
        f"  {name:<{room}}",
        Cell(f"{duration(took):>9}", "bad" if inside else "strong"),
        Cell(f"  {'inside' if inside else '':<6}", "bad"),
        Cell(f"{size(call.size_bytes):>7}  {shown(call.group)}", "dim"),
    )
