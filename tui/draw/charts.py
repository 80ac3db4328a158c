"""Sparklines, stacked bars, gauges and heat strips as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len

from ddpdoctor.diagnosis.performance.summary import Phases
from ddpdoctor.tui.draw.cells import Cell, Line, joined, line
from ddpdoctor.tui.draw.figures import duration, share
from ddpdoctor.tui.draw.glyphs import Glyphs

Series = Sequence[float | None]


class Phase(NamedTuple):
    """How a phase of a step is drawn."""

    role: str
    words: str
    letter: str
    """Fills its part of a bar where there is no colour; what costs a job its speed in capitals."""


PHASES = {
    "data_wait": Phase("data", "data wait", "d"),
    "forward": Phase("forward", "forward", "f"),
    "backward_compute": Phase("backward", "backward", "b"),
    "exposed_waiting": Phase("waiting", "waiting for ranks", "W"),
    "exposed_transfer": Phase("transfer", "transfer", "T"),
    "explicit": Phase("explicit", "explicit collectives", "C"),
    "optimizer": Phase("optimizer", "optimizer", "o"),
    "other": Phase("other", "other", "."),
}
LATE_SHARES = (0.02, 0.06, 0.15, 0.35)
"""Lateness as a share of the median step at which a heat strip becomes hotter."""
HEAT_LEVELS = (1, 2, 4, 6, 8)
"""How tall each is drawn."""

GAP = 3
"""Between two entries that stand beside each other."""
WIDEST = 4
"""Columns that a value takes at most while there are few of them."""
OUTLYING = 5.0
"""A value above so many times the median one is cut off, so that the others can be distinguished."""


def newest(values: Series, width: int) -> list[float | None]:
    """Return the last values in ``width`` columns, unknown ones before the first: a series moves by whole columns."""
    each = max(1, min(WIDEST, width // max(1, len(values))))  # So that a course that has begun can be read.
    kept = [value for value in values[-width:] for _ in range(each)] if width > 0 else []
    return [None] * (width - len(kept)) + kept


def top_of(*series: Series) -> float:
    """Return a ceiling for series that are drawn together: a little above the greatest value, in steps of 1, 2, 5."""
    greatest = max((value for values in series for value in values if value is not None), default=0.0)
    if greatest <= 0:
        return 1.0
    unit = 1.0
    while unit > greatest:
        unit /= 10
    while unit * 10 <= greatest:
        unit *= 10
    return next(unit * factor for factor in (1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12) if unit * factor >= greatest)


def ceiling_of(low: Series, high: Series) -> tuple[float, float | None]:
    """Return a ceiling for two series that are drawn together, and the greatest value where some are cut off by it."""
    known = [value for values in (low, high) for value in values if value is not None]
    middle = sorted(value for value in low if value is not None)
    limit = OUTLYING * middle[len(middle) // 2] if middle else 0.0
    greatest = max(known, default=0.0)
    return top_of([value for value in known if value <= limit]), greatest if greatest > limit else None


def sparkline(values: Series, width: int, glyphs: Glyphs, high: float) -> Line:
    """Return one line of columns, newest at the right; a value that is known is never invisible."""
    steps = len(glyphs.levels) - 1
    filled = (
        0 if value is None else max(1, min(steps, round(steps * value / (high or 1.0))))
        for value in newest(values, width)
    )
    return (Cell("".join(glyphs.levels[level] for level in filled), "series"),)


def spread(low: Series, high: Series, width: int, height: int, glyphs: Glyphs, top: float) -> list[Line]:
    """Columns up to ``low``, and in a fainter hue on top of them up to ``high``."""
    steps = len(glyphs.levels) - 1

    def level(value: float | None) -> int:
        return 0 if value is None else max(1, min(steps * height, round(steps * height * value / (top or 1.0))))

    pairs = [(level(one), level(other)) for one, other in zip(newest(low, width), newest(high, width), strict=True)]
    lines: list[Line] = []
    for row in range(height):
        below = steps * (height - 1 - row)
        signs = []
        for first, second in pairs:
            inner, outer = max(0, min(steps, first - below)), max(0, min(steps, second - below))
            if inner:
                signs.append(Cell(glyphs.levels[inner], "series.over" if outer == steps > inner else "series"))
            else:
                signs.append(Cell(glyphs.levels[outer], "over"))
        lines.append(joined(signs))
    return lines


def gauge(ratio: float | None, width: int, glyphs: Glyphs, role: str, limit: float | None = None) -> Line:
    """Return a bar from 0 to 1, with a mark at ``limit``."""
    filled = 0 if ratio is None else max(0, min(width, round(width * ratio)))
    if ratio and not filled:
        filled = 1
    mark = -1 if limit is None else min(width - 1, round(width * limit))
    cells: list[Cell] = []
    for start, end, sign, style in ((0, filled, glyphs.full, role), (filled, width, glyphs.empty, "faint")):
        if start <= mark < end:
            cells += [Cell(sign * (mark - start), style), Cell(glyphs.limit, "strong")]
            cells.append(Cell(sign * (end - mark - 1), style))
        else:
            cells.append(Cell(sign * (end - start), style))
    return tuple(cell for cell in cells if cell.text)


def parts_of(phases: Phases) -> list[tuple[Phase, float]]:
    """Return the phases of a step in their order, those that were not measured left out."""
    return [(PHASES[name], ns) for name, ns in phases.parts_ns().items() if ns is not None and ns > 0]


def columns_of(values: Sequence[float], width: int) -> list[int]:
    """Share out ``width`` columns in proportion; what is left over goes to the greatest remainders."""
    total = sum(values)
    if total <= 0 or width <= 0:
        return [0] * len(values)
    exact = [width * value / total for value in values]
    columns = [int(value) for value in exact]
    order = sorted(range(len(values)), key=lambda index: exact[index] - columns[index], reverse=True)
    for index in order[: width - sum(columns)]:
        columns[index] += 1
    return columns


def phase_bar(phases: Phases, width: int, coloured: bool) -> Line:
    """Return a step as one stacked bar; a part that has room carries its name and share."""
    parts = parts_of(phases)
    total = sum(value for _, value in parts) or 1.0
    cells = []
    for (phase, value), columns in zip(parts, columns_of([value for _, value in parts], width), strict=True):
        if not columns:
            continue
        words = f" {phase.words} {share(value / total)}"
        if cell_len(words) >= columns:
            words = f" {share(value / total)}"
        if cell_len(words) >= columns:
            words = ""
        if coloured:
            cells.append(Cell(words.ljust(columns), f"on.{phase.role}"))
        else:
            cells.append(Cell((f"{words} " if words else "").ljust(columns, phase.letter)))
    return tuple(cells)


def phase_lines(phases: Phases, width: int, glyphs: Glyphs, coloured: bool) -> list[Line]:
    """Return the bar, and below it one entry a phase: its sign, its name, its time; in the order of the step."""
    entries: list[Line] = []
    for phase, value in parts_of(phases):
        sign = glyphs.full if coloured else phase.letter
        entries.append(
            (Cell(f"{sign} ", f"phase.{phase.role}"), Cell(f"{phase.words} "), Cell(duration(value), "strong"))
        )
    return [line("  ", *phase_bar(phases, width - 4, coloured)), *flowing(entries, width)]


def heat_of(late_ns: float | None, step_ns: float | None) -> int | None:
    """Return how hot a lateness is drawn, 0 to 4; None where it is not known."""
    if late_ns is None or not step_ns:
        return None
    return sum(late_ns / step_ns >= bound for bound in LATE_SHARES)


def heat_strip(lateness_ns: Series, step_ns: float | None, width: int, glyphs: Glyphs) -> Line:
    """Return how late a rank came, newest at the right: taller and hotter with its share of the median step."""
    heats = (heat_of(value, step_ns) for value in newest(lateness_ns, width))
    return joined(Cell(" ", "faint") if heat is None else heat_sign(heat, glyphs) for heat in heats)


def heat_sign(heat: int, glyphs: Glyphs) -> Cell:
    """Return one sign of a heat strip."""
    return Cell(glyphs.levels[HEAT_LEVELS[heat]], f"heat.{heat}")


def flowing(entries: Sequence[Line], width: int) -> list[Line]:
    """Entries one after the other on as many lines as they need, two columns from either edge."""
    lines: list[list[Cell]] = [[]]
    used = 0
    for entry in entries:
        room = sum(cell_len(cell.text) for cell in entry)
        if used and used + GAP + room > width - 4:
            lines.append([])
            used = 0
        if used:
            lines[-1].append(Cell(" " * GAP))
            used += GAP
        lines[-1].extend(entry)
        used += room
    return [line("  ", *cells) for cells in lines if cells]
