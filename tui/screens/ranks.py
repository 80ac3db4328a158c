"""The page of all ranks: what each does now, its step times, its waiting, its GPU, and how late it came over time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddpdoctor.monitor.snapshot import RankView
from ddpdoctor.record.streams.measured import Gpu, GpuSample
from ddpdoctor.tui.draw.cells import EMPTY, Cell, Line, Painting, in_role, line, shown, stacked
from ddpdoctor.tui.draw.charts import heat_strip
from ddpdoctor.tui.draw.figures import count, degrees, duration, memory, percent, span, three, watts
from ddpdoctor.tui.draw.table import Column, figure_column, paint_table
from ddpdoctor.tui.screens.many_ranks import is_big, paint_many_ranks
from ddpdoctor.tui.screens.sections import aged_heading, heading
from ddpdoctor.tui.view import View


@dataclass(frozen=True, slots=True)
class RankRow:
    """A rank with the newest sample of its GPU."""

    rank: RankView
    gpu: Gpu | None
    sample: GpuSample | None


SORTS = ("", "p50", "p95", "waits", "data", "step", "busy", "memory", "temperature", "rank")
"""Columns that the key for sorting goes through; the first is the order of importance."""


GPU_COLUMNS = {"gpu", "busy", "memory", "temperature", "power"}
"""Columns that say nothing where no GPU is seen."""


def paint_ranks(view: View, width: int, height: int) -> Painting:
    """Draw the table; the culprit stands on top until the user sorts otherwise. Of very many ranks, draw the nodes."""
    if is_big(view):
        return paint_many_ranks(view, width, height)
    snapshot = view.snapshot
    rows = rank_rows(view)
    remark = f"{len(rows)} of {len(snapshot.ranks)}, filtered by {shown(view.filter)}" if view.filter else ""
    head = aged_heading(f"Ranks ({len(rows)})", view, snapshot.measured_at_ns, width, remark)
    if not rows:
        text = "no rank matches the filter" if view.filter else "no rank has reported yet"
        return stacked(height, [head, line(Cell(f"  {text}", "dim"))])
    hosts = len({rank.host for rank in snapshot.ranks}) > 1
    apart = height - 3 - len(rows) >= len(rows) + 3
    left_out = {"late"} if apart else set()
    left_out |= set() if snapshot.gpus else GPU_COLUMNS
    columns = [column for column in _columns(view, hosts) if column.name not in left_out]
    table = paint_table(rows, columns, _key, view.cursor, width, height - 2, view.glyphs)
    strips = _strips(rows, view, width) if apart else []
    return stacked(height, [head], table, [EMPTY], strips)


def _strips(rows: list[RankRow], view: View, width: int) -> list[Line]:
    """Return the lateness of every rank once more, over all the width."""
    digits = max(len(str(row.rank.rank)) for row in rows)
    lines = [heading("How late each rank is", width, view.glyphs, "as a share of the step, newest at the right")]
    for row in sorted(rows, key=lambda row: row.rank.rank):
        strip = heat_strip(row.rank.lateness_ns, row.rank.median_ns, width - digits - 11, view.glyphs)
        role = "bad" if row.rank.culprit else "dim"
        lines.append(line(Cell(f"  rank {row.rank.rank:>{digits}}  ", role), *strip))
    return lines


def rank_rows(view: View) -> list[RankRow]:
    """Return the ranks that the filter leaves, culprits first."""
    gpus = {rank: gpu for gpu in view.snapshot.gpus for rank in gpu.ranks}
    words = view.filter.lower().split()
    rows = []
    for rank in view.snapshot.ranks:
        if words and not all(word in _searched(rank) for word in words):
            continue
        gpu = gpus.get(rank.rank)
        rows.append(RankRow(rank, gpu, gpu.samples[-1] if gpu is not None and gpu.samples else None))
    return sorted(rows, key=lambda row: (not row.rank.culprit, row.rank.rank))


def _searched(rank: RankView) -> str:
    return f"rank {rank.rank} {rank.host} {rank.state} gpu {rank.gpu_index}".lower()


def _key(row: RankRow) -> str:
    return str(row.rank.rank)


def _columns(view: View, hosts: bool) -> list[Column[RankRow]]:
    glyphs = view.glyphs

    def name(row: RankRow, width: int) -> Line:
        sign = f" {glyphs.culprit}" if row.rank.culprit else "  "
        return line(Cell(f"{row.rank.rank}{sign}", "bad" if row.rank.culprit else "strong"))

    def state(row: RankRow, width: int) -> Line:
        rank = row.rank
        since = "" if rank.state_since_ns is None else span(view.snapshot.now_ns - rank.state_since_ns)
        long = rank.state_since_ns is not None and view.snapshot.now_ns - rank.state_since_ns >= 1_000_000_000
        role = "bad" if rank.culprit else "" if rank.alive else "dim"
        age, words = view.age(rank.beat_at_ns) if rank.alive and rank.beat_at_ns is not None else ("fresh", "")
        if age == "stale":
            return line(Cell(f"no heartbeat for {words.removesuffix(' old')}", "warning"))
        text = shown(rank.state) + (f" for {since}" if long and rank.alive else "")
        return line(Cell(text, "dim" if age == "old" else role))

    def figure(row: RankRow, text: str, role: str = "") -> Cell:
        return view.aged(text, row.rank.measured_at_ns, role)

    def dim(row: RankRow, text: str) -> Cell:
        return Cell(text, "dim")

    def p95_ns(row: RankRow) -> float | None:
        return row.rank.step_times.p95_ns if row.rank.step_times else None

    def data_wait_ns(row: RankRow) -> float | None:
        return row.rank.phases.data_wait_ns if row.rank.phases else None

    def strip(row: RankRow, width: int) -> Line:
        drawn = heat_strip(row.rank.lateness_ns, row.rank.median_ns, width, glyphs)
        return in_role(drawn, "dim") if view.age(row.rank.measured_at_ns)[0] == "stale" else drawn

    return [
        Column(
            name="rank", title="rank  ", width=6, importance=1, align="right", cell=name, key=lambda row: row.rank.rank
        ),
        Column(
            name="host",
            title="host",
            width=9,
            most=18,
            importance=7 if hosts else 15,
            cell=lambda row, width: Cell(shown(row.rank.host) or glyphs.unknown, "dim"),
            key=lambda row: row.rank.host or None,
        ),
        figure_column("gpu", "GPU", lambda row: row.rank.gpu_index, count, dim, width=3, importance=10),
        figure_column("step", "step", lambda row: row.rank.step, count, figure, width=8, importance=6),
        Column(name="state", title="now", width=22, most=46, importance=2, cell=state, key=lambda row: row.rank.state),
        figure_column("p50", "median", lambda row: row.rank.median_ns, duration, figure, width=7, importance=3),
        figure_column("p95", "p95", p95_ns, duration, figure, width=7, importance=9),
        figure_column("data", "data", data_wait_ns, duration, figure, width=7, importance=8),
        figure_column("waits", "waits", lambda row: row.rank.waiting_ns, duration, figure, width=7, importance=4),
        *_gpu_columns(view),
        figure_column(
            "samples", "samples/s", lambda row: row.rank.samples_per_s, three, figure, width=9, importance=16
        ),
        Column(name="late", title="late", width=16, most=-1, importance=5, cell=strip),
    ]


def _gpu_columns(view: View) -> list[Column[RankRow]]:
    def figure(row: RankRow, text: str, role: str = "") -> Cell:
        return view.aged(text, row.sample.taken_at_ns if row.sample else None, role)

    def heat(row: RankRow, text: str) -> Cell:
        throttled = row.sample is not None and row.sample.throttle_reasons
        return figure(row, text, "warning" if throttled else "")

    def of_sample(value: Callable[[GpuSample], float | None]) -> Callable[[RankRow], float | None]:
        return lambda row: value(row.sample) if row.sample else None

    busy = of_sample(lambda sample: sample.utilisation_percent)
    used = of_sample(lambda sample: sample.memory_used_bytes)
    temperature = of_sample(lambda sample: sample.temperature_c)
    power = of_sample(lambda sample: sample.power_w)
    return [
        figure_column("busy", "busy", busy, percent, figure, width=5, importance=11),
        figure_column("memory", "memory", used, memory, figure, width=8, importance=12),
        figure_column("temperature", "temp", temperature, degrees, heat, width=5, importance=13),
        figure_column("power", "power", power, watts, figure, width=6, importance=14),
    ]
