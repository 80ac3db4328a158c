"""The page of GPUs: a card for each where there is room, a line for each otherwise."""

from __future__ import annotations

from collections.abc import Callable

from ddpdoctor.finding import rank_list
from ddpdoctor.record.streams.measured import Gpu, GpuSample
from ddpdoctor.tui.draw.cells import EMPTY, Cell, Line, Painting, cut, in_columns, line, paragraph, shown, stacked
from ddpdoctor.tui.draw.charts import gauge, sparkline
from ddpdoctor.tui.draw.figures import degrees, megahertz, memory, percent, three, watts
from ddpdoctor.tui.draw.table import Column, figure_column, paint_table, text_column
from ddpdoctor.tui.screens.sections import aged_heading, as_fresh, heading
from ddpdoctor.tui.view import View

CARD_WIDTH = 58
CARD_LINES = 6
"""Lines of a card, the empty one below it included."""


def paint_gpus(view: View, width: int, height: int) -> Painting:
    """Draw all GPUs of this node."""
    gpus = view.snapshot.gpus
    newest = max((gpu.samples[-1].taken_at_ns for gpu in gpus if gpu.samples), default=None)
    head = aged_heading("GPUs of this node", view, newest, width, f"{len(gpus)} seen" if gpus else "")
    if not gpus:
        note = shown(view.snapshot.gpus_note) or "the driver shows no GPU"
        return stacked(height, [head, *paragraph(note, width - 4, "dim", Cell("  "))])
    columns = max(1, (width + 2) // (CARD_WIDTH + 2))
    if -(-len(gpus) // columns) * CARD_LINES <= height - 1:
        columns = min(columns, len(gpus))
        card_width = (width - 2 * (columns - 1)) // columns
        cards = in_columns([_card(gpu, view, card_width) for gpu in gpus], columns, card_width, 2)
        return stacked(height, [head, EMPTY] if len(cards) + 2 <= height else [head], cards)
    table = paint_table(gpus, _columns(view), lambda gpu: str(gpu.index), view.cursor, width, height - 1, view.glyphs)
    return stacked(height, [head], table)


def _card(gpu: Gpu, view: View, width: int) -> list[Line]:
    glyphs = view.glyphs
    sample = _newest(gpu)
    title = f"GPU {gpu.index}" + (f", {rank_list(gpu.ranks)}" if gpu.ranks else "")
    bar = max(6, width - 34)
    throttled = ", ".join(shown(reason) for reason in sample.throttle_reasons)
    used = _memory_share(gpu, sample)
    history = sparkline([one.utilisation_percent for one in gpu.samples], bar, glyphs, 100.0)
    power = sparkline([one.power_w for one in gpu.samples], bar, glyphs, gpu.power_limit_w or 1_000.0)
    lines = [
        _measured("busy", percent(sample.utilisation_percent), "", history),
        _measured(
            "memory",
            memory(sample.memory_used_bytes),
            memory(gpu.memory_total_bytes),
            gauge(used, bar, glyphs, "series"),
        ),
        _measured("power", watts(sample.power_w), watts(gpu.power_limit_w), power),
        line(
            Cell("  clock   ", "dim"),
            Cell(f"{three(sample.sm_clock_mhz):>8}", "strong"),
            Cell(f" {'of ' + three(gpu.maximum_sm_clock_mhz) + ' MHz':<14}", "dim"),
            Cell(degrees(sample.temperature_c), "warning" if throttled else "strong"),
            Cell(f"  {cut(throttled, width - 40, glyphs.dots)}" if throttled else "", "warning"),
            Cell("" if throttled else _processes(sample, width - 40, glyphs.dots), "dim"),
        ),
    ]
    head = heading(title, width, glyphs, cut(shown(gpu.name), width - 24, glyphs.dots))
    return [head, *as_fresh(lines, view, sample.taken_at_ns)]


def _measured(name: str, value: str, limit: str, chart: Line) -> Line:
    of = f"of {limit}" if limit else ""
    return line(Cell(f"  {name:<8}", "dim"), Cell(f"{value:>8}", "strong"), Cell(f" {of:<14}", "dim"), *chart)


def _processes(sample: GpuSample, room: int, dots: str) -> str:
    words = [f"pid {pid} {memory(size)}" for pid, size in sample.processes]
    return "  " + cut(", ".join(words), max(4, room), dots) if words else ""


def _newest(gpu: Gpu) -> GpuSample:
    return gpu.samples[-1] if gpu.samples else GpuSample(taken_at_ns=0)


def _memory_share(gpu: Gpu, sample: GpuSample) -> float | None:
    if sample.memory_used_bytes is None or not gpu.memory_total_bytes:
        return None
    return sample.memory_used_bytes / gpu.memory_total_bytes


def _columns(view: View) -> list[Column[Gpu]]:
    glyphs = view.glyphs

    def figure(gpu: Gpu, text: str, role: str = "") -> Cell:
        return view.aged(text, _newest(gpu).taken_at_ns, role)

    def strong(gpu: Gpu, text: str) -> Cell:
        return figure(gpu, text, "strong")

    def heat(gpu: Gpu, text: str) -> Cell:
        return figure(gpu, text, "warning" if _newest(gpu).throttle_reasons else "")

    def of_newest(value: Callable[[GpuSample], float | None]) -> Callable[[Gpu], float | None]:
        return lambda gpu: value(_newest(gpu))

    def speed(gpu: Gpu, width: int) -> Cell:
        reasons = ", ".join(shown(reason) for reason in _newest(gpu).throttle_reasons)
        return figure(gpu, reasons or "full speed", "warning" if reasons else "dim")

    def filled(gpu: Gpu, width: int) -> Line:
        return gauge(_memory_share(gpu, _newest(gpu)), width, glyphs, "series")

    busy = of_newest(lambda sample: sample.utilisation_percent)
    used = of_newest(lambda sample: sample.memory_used_bytes)
    power = of_newest(lambda sample: sample.power_w)
    temperature = of_newest(lambda sample: sample.temperature_c)
    clock = of_newest(lambda sample: sample.sm_clock_mhz)
    return [
        figure_column(
            "gpu", "GPU", lambda gpu: gpu.index, str, lambda gpu, text: Cell(text, "strong"), width=4, importance=1
        ),
        Column(
            name="ranks",
            title="ranks",
            width=7,
            most=14,
            importance=6,
            cell=lambda gpu, width: Cell(rank_list(gpu.ranks) if gpu.ranks else glyphs.unknown, "dim"),
        ),
        figure_column("busy", "busy", busy, percent, strong, width=5, importance=2),
        figure_column("memory", "memory", used, memory, figure, width=8, importance=3),
        Column(name="filled", title="", width=8, most=16, importance=10, cell=filled),
        figure_column("power", "power", power, watts, figure, width=6, importance=5),
        figure_column("temperature", "temp", temperature, degrees, heat, width=5, importance=4),
        figure_column("clock", "clock", clock, megahertz, figure, width=9, importance=8),
        Column(name="speed", title="speed", width=16, most=30, importance=7, cell=speed),
        text_column(
            "name", "name", lambda gpu: Cell(shown(gpu.name) or glyphs.unknown, "dim"), width=12, most=24, importance=11
        ),
        Column(
            name="history",
            title="busy over time",
            width=14,
            most=-1,
            importance=9,
            cell=lambda gpu, width: sparkline([one.utilisation_percent for one in gpu.samples], width, glyphs, 100.0),
        ),
    ]
