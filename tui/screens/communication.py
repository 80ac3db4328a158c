"""The page of communication: what each group moves, how fast, how much of it is hidden; DDP's buckets."""

from __future__ import annotations

from ddpdoctor.diagnosis.performance.summary import Traffic
from ddpdoctor.monitor.snapshot import BucketView
from ddpdoctor.tui.draw.cells import EMPTY, Cell, Line, Painting, cut, line, paragraph, shown, stacked
from ddpdoctor.tui.draw.charts import gauge
from ddpdoctor.tui.draw.figures import bandwidth, calls, count, duration, share, size
from ddpdoctor.tui.draw.table import Column, figure_column, paint_table, text_column
from ddpdoctor.tui.screens.sections import aged_heading, as_fresh, heading
from ddpdoctor.tui.view import View

_NOTES = (
    "time of gradients: from the first bucket launched to the last finished",
    "bus bandwidth: a lower bound of what each link carries, and what it should",
)


def paint_communication(view: View, width: int, height: int) -> Painting:
    """Draw traffic above buckets."""
    snapshot = view.snapshot
    head = aged_heading("Communication, per step", view, snapshot.measured_at_ns, width)
    if snapshot.traffic:
        rows, columns = snapshot.traffic, _traffic_columns(view)
        table = paint_table(rows, columns, lambda row: row.group + row.kind, None, width, len(rows) + 1, view.glyphs)
        traffic = as_fresh(list(table.lines), view, snapshot.measured_at_ns)
    else:
        traffic = [line(Cell("  no communication measured yet", "dim"))]
    notes = [cells for note in _NOTES for cells in paragraph(note, width - 4, "dim", Cell("  "))]
    buckets = _buckets(snapshot.buckets, view, width, height - len(traffic) - 5)
    return stacked(height, [head], traffic, [EMPTY, *notes] if height > 12 else [], [EMPTY], buckets)


def _traffic_columns(view: View) -> list[Column[Traffic]]:
    glyphs = view.glyphs

    def used(row: Traffic) -> float | None:
        if row.bus_bandwidth_bytes_per_s is None or not row.limit_bytes_per_s:
            return None
        return row.bus_bandwidth_bytes_per_s / row.limit_bytes_per_s

    def carried(row: Traffic) -> float | None:
        return row.bus_bandwidth_bytes_per_s

    def plain(row: Traffic, text: str) -> Cell:
        return Cell(text)

    def strong(row: Traffic, text: str) -> Cell:
        return Cell(text, "strong")

    def of_limit(row: Traffic, width: int) -> Line:
        ratio = used(row)
        if ratio is None:
            return line(Cell(glyphs.unknown, "dim"))
        return line(
            Cell(f"{share(ratio):>6} "), *gauge(ratio, width - 7, glyphs, "good" if ratio >= 0.5 else "warning")
        )

    return [
        text_column("kind", "what", lambda row: Cell(shown(row.kind), "strong"), width=12, most=24, importance=1),
        text_column("group", "between", lambda row: Cell(shown(row.group)), width=12, most=28, importance=2),
        figure_column("calls", "calls", lambda row: row.calls_per_step, calls, plain, width=6, importance=4),
        figure_column("bytes", "bytes", lambda row: row.bytes_per_step, size, plain, width=8, importance=3),
        figure_column("time", "time", lambda row: row.ns_per_step, duration, plain, width=8, importance=5),
        figure_column("hidden", "hidden", lambda row: row.overlap_ratio, share, plain, width=6, importance=6),
        figure_column("bandwidth", "bus bandwidth", carried, bandwidth, strong, width=13, importance=7),
        Column(name="limit", title="of limit", width=16, most=30, importance=8, cell=of_limit),
        text_column(
            "backend", "backend", lambda row: Cell(shown(row.backend) or glyphs.unknown, "dim"), width=7, importance=9
        ),
    ]


def _buckets(buckets: tuple[BucketView, ...], view: View, width: int, room: int) -> list[Line]:
    """Return the buckets in the order in which they became ready, with bars in proportion."""
    total = sum(bucket.size_bytes for bucket in buckets)
    remark = f"{len(buckets)}, {size(total)} together" if buckets else ""
    head = heading("Gradient buckets, in order of readiness", width, view.glyphs, remark)
    if not buckets:
        return [head, line(Cell("  not known yet", "dim"))]
    biggest = max(bucket.size_bytes for bucket in buckets) or 1
    bar = max(8, min(40, width - 70))
    several = len({bucket.module for bucket in buckets}) > 1
    lines = [
        line(
            Cell(f"  {bucket.order:>3}  "),
            *gauge(bucket.size_bytes / biggest, bar, view.glyphs, "series"),
            Cell(f"  {size(bucket.size_bytes):>8}", "strong"),
            Cell(f"  {count(bucket.parameters):>5} {'parameter ' if bucket.parameters == 1 else 'parameters'}", "dim"),
            Cell(cut(_first(bucket, several), max(4, width - bar - 36), view.glyphs.dots)),
        )
        for bucket in buckets[: max(1, room)]
    ]
    if len(buckets) > len(lines):
        lines[-1] = line(Cell(f"    and {len(buckets) - len(lines) + 1} more", "dim"))
    return [head, *lines]


def _first(bucket: BucketView, several: bool) -> str:
    """Return where a bucket begins, and in which module where there are several."""
    words = f"  from {shown(bucket.first_parameter)}" if bucket.first_parameter else ""
    return words + (f" of {shown(bucket.module)}" if several else "")
