"""A table with a cursor: columns by the room there is, rows sorted and filtered, only those in sight drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.cells import cell_len

from ddpdoctor.tui.draw.cells import Align, Cell, Line, Painting, Target, fitted, line, marked, padded, width_of
from ddpdoctor.tui.draw.glyphs import Glyphs

Row = TypeVar("Row")
Value = TypeVar("Value", bound=float)
SortKey = float | str | None
GAP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(Generic[Row]):
    """One column."""

    name: str
    title: str
    width: int
    """The least that it needs."""
    most: int = 0
    """How wide it may become; 0 for as wide as it is, -1 for all that is left."""
    importance: int
    """The most important columns, from 1, stay when there is little room."""
    align: Align = "left"
    cell: Callable[[Row, int], Cell | Line]
    """Draws a row's cell for a width."""
    key: Callable[[Row], SortKey] | None = None
    """What to sort by; None where the order would mean nothing."""


def text_column(
    name: str, title: str, cell: Callable[[Row], Cell], *, width: int, most: int = 0, importance: int
) -> Column[Row]:
    """Return a column of words, the same for any width."""
    return Column(
        name=name, title=title, width=width, most=most, importance=importance, cell=lambda row, wide: cell(row)
    )


def figure_column(
    name: str,
    title: str,
    value: Callable[[Row], Value | None],
    words: Callable[[Value | None], str],
    cell: Callable[[Row, str], Cell],
    *,
    width: int,
    importance: int,
) -> Column[Row]:
    """Return a right-aligned column of figures, sorted by these: ``cell`` draws a row's as ``words`` put it."""
    return Column(
        name=name,
        title=title,
        width=width,
        importance=importance,
        align="right",
        cell=lambda row, width: cell(row, words(value(row))),
        key=value,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where the user is in a table."""

    selected: str = ""
    """Key of a row; the first row when no row has it."""
    top: int = 0
    """First row in sight."""
    sort: str = ""
    """Name of a column; empty for the order in which the rows come."""
    descending: bool = False


def paint_table(
    rows: Sequence[Row],
    columns: Sequence[Column[Row]],
    key_of: Callable[[Row], str],
    cursor: Cursor | None,
    width: int,
    height: int,
    glyphs: Glyphs,
) -> Painting:
    """Draw the heading and the rows in sight around the selected one; without a cursor, the first rows."""
    selectable, cursor = cursor is not None, cursor or Cursor()
    chosen = fit_columns(columns, width - 2)
    ordered = sort_rows(rows, columns, cursor)
    keys = tuple(map(key_of, ordered))
    position = keys.index(cursor.selected) if cursor.selected in keys else 0
    room = max(1, height - 1)
    top = max(0, min(cursor.top, len(ordered) - room))
    top = min(max(top, position - room + 1), position) if ordered else 0
    heading, targets = _heading(chosen, cursor, glyphs)
    lines = [heading]
    for number in range(top, min(len(ordered), top + room)):
        selected = selectable and number == position
        cells = [Cell(f"{glyphs.cursor} " if selected else "  ", "key")]
        for index, (column, columns_wide) in enumerate(chosen):
            if index:
                cells.append(Cell(" " * GAP))
            cells += _placed(column.cell(ordered[number], columns_wide), columns_wide, column.align, glyphs)
        lines.append(marked(tuple(cells), width) if selected else tuple(cells))
        targets.append(Target(len(lines) - 1, 0, width, f"select {keys[number]}"))
    if not selectable:
        return Painting(tuple(lines))
    return Painting(tuple(lines), tuple(targets), top, keys)


def fit_columns(columns: Sequence[Column[Row]], width: int) -> list[tuple[Column[Row], int]]:
    """Choose the columns that have room, the most important first, and share out what is left over."""
    kept: list[Column[Row]] = []
    used = -GAP
    for column in sorted(columns, key=lambda column: column.importance):
        if kept and used + GAP + column.width > width:
            break
        kept.append(column)
        used += GAP + column.width
    chosen = [column for column in columns if column in kept]
    widths = [min(column.width, width) for column in chosen]
    left = width - used
    for index, column in enumerate(chosen):
        more = max(0, min(left, column.most - column.width))
        widths[index] += more
        left -= more
    for index, column in enumerate(chosen):
        if column.most < 0:
            widths[index] += max(0, left)
            break
    return list(zip(chosen, widths, strict=True))


def sort_rows(rows: Sequence[Row], columns: Sequence[Column[Row]], cursor: Cursor) -> list[Row]:
    """Sort by the cursor's column; rows without a value come last in either direction."""
    column = next((column for column in columns if column.name == cursor.sort), None)
    key = column.key if column is not None else None
    if key is None:
        return list(rows)
    known = [(value, row) for row in rows if (value := key(row)) is not None]
    unknown = [row for row in rows if key(row) is None]
    numbers = all(isinstance(value, (int, float)) for value, _ in known)
    known.sort(key=lambda pair: pair[0] if numbers else str(pair[0]), reverse=cursor.descending)
    return [row for _, row in known] + unknown


def _heading(chosen: Sequence[tuple[Column[Row], int]], cursor: Cursor, glyphs: Glyphs) -> tuple[Line, list[Target]]:
    cells = [Cell("  ")]
    targets = []
    at = 2
    for index, (column, wide) in enumerate(chosen):
        if index:
            cells.append(Cell(" " * GAP))
            at += GAP
        sorted_by = column.name == cursor.sort
        arrow = (glyphs.up if cursor.descending else glyphs.down) if sorted_by else ""
        title = column.title + arrow if cell_len(column.title + arrow) <= wide else column.title
        cells.append(Cell(padded(title, wide, column.align, glyphs.dots), "key" if sorted_by else "dim"))
        if column.key is not None:
            targets.append(Target(0, at, at + wide, f"sort {column.name}"))
        at += wide
    return tuple(cells), targets


def _placed(content: Cell | Line, width: int, align: Align, glyphs: Glyphs) -> Line:
    if isinstance(content, Cell):
        return line(Cell(padded(content.text, width, align, glyphs.dots), content.role))
    if align == "right" and width_of(content) < width:
        return (Cell(" " * (width - width_of(content))), *content)
    return fitted(content, width, glyphs.dots)
