"""Lines of the screen as plain data: runs of text, each with a role that the palette turns into a style.

Everything that is drawn is a ``Line``; drawing is a pure function of what is shown and of the room there is. Text from
outside becomes part of a line through ``shown`` only, which takes from it whatever a terminal would obey.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from rich.cells import cell_len, set_cell_size

from ddpdoctor.report.streams import one_line

Align = Literal["left", "right"]
_UNITS = re.compile(r"(\d) (?=(?:[nmµ]?s|%|[kMGT]i?B(?:/s)?|°C|MHz|W|min|h|d)(?:\W|$))")
"""Between a number and its unit no line is broken."""
CLEANED_CHARACTERS = 2_000
"""Of a longer text no more is read: no line of a terminal has room for it."""


class Cell(NamedTuple):
    """A run of text in one style."""

    text: str
    role: str = ""


Line = tuple[Cell, ...]

EMPTY: Line = ()


def shown(text: str) -> str:
    """Text from outside on one line, without anything that a terminal obeys, hides, or draws wider than it counts."""
    cleaned = one_line(text[:CLEANED_CHARACTERS])
    return cleaned if cleaned.isascii() else "".join(map(_steady, cleaned))


def _steady(character: str) -> str:
    """Replace what terminals draw in ways of their own: marks that stack, joiners, right-to-left letters."""
    if unicodedata.combining(character) or unicodedata.category(character) in {"Mn", "Me", "Cf", "Co", "Cn"}:
        return ""
    if unicodedata.bidirectional(character) in {"R", "AL", "AN"}:
        return character.encode("unicode_escape").decode("ascii")
    return character


def line(*parts: Cell | str) -> Line:
    """Put a line together; empty parts are left out."""
    cells = (part if isinstance(part, Cell) else Cell(part) for part in parts)
    return tuple(cell for cell in cells if cell.text)


def width_of(cells: Line) -> int:
    """Columns that a line takes."""
    return sum(cell_len(cell.text) for cell in cells)


def cut(text: str, width: int, dots: str = "…") -> str:
    """Shorten ``text`` to ``width`` columns, its end replaced by dots."""
    if cell_len(text) <= width:
        return text
    if width <= cell_len(dots):
        return set_cell_size(text, max(0, width))
    return set_cell_size(text, width - cell_len(dots)).rstrip() + dots


def cut_left(text: str, width: int, dots: str = "…") -> str:
    """Shorten ``text`` to ``width`` columns, its beginning replaced by dots: the end of a path says more."""
    if cell_len(text) <= width:
        return text
    while text and cell_len(text) > max(0, width - cell_len(dots)):
        text = text[1:]
    return (dots + text)[: max(0, width)]


def padded(text: str, width: int, align: Align = "left", dots: str = "…") -> str:
    """``text`` in exactly ``width`` columns."""
    text = cut(text, width, dots)
    room = " " * (width - cell_len(text))
    return room + text if align == "right" else text + room


def fitted(cells: Line, width: int, dots: str = "…") -> Line:
    """Return a line in exactly ``width`` columns: cut at its end, or filled with spaces."""
    total = width_of(cells)
    if total == width:
        return cells
    if total < width:
        return (*cells, Cell(" " * (width - total)))
    kept: list[Cell] = []
    left = width
    for cell in cells:
        size = cell_len(cell.text)
        if size > left or (size == left and cell is not cells[-1]):
            kept.append(Cell(padded(cell.text + dots, left, dots=dots), cell.role))
            break
        kept.append(cell)
        left -= size
    return tuple(kept)


def beside(left: Sequence[Line], right: Sequence[Line], left_width: int, gap: int = 2) -> list[Line]:
    """Return two blocks of lines beside each other."""
    space = Cell(" " * gap)
    return [
        (
            *fitted(left[row] if row < len(left) else EMPTY, left_width),
            space,
            *(right[row] if row < len(right) else EMPTY),
        )
        for row in range(max(len(left), len(right)))
    ]


def in_columns(blocks: Sequence[Sequence[Line]], columns: int, width: int, gap: int) -> list[Line]:
    """Return blocks of one width beside each other, so many in a row, with an empty line below each row."""
    lines: list[Line] = []
    for start in range(0, len(blocks), columns):
        row: list[Line] = []
        for number, block in enumerate(blocks[start : start + columns]):
            row = beside(row, block, number * (width + gap) - gap, gap) if number else [*block]
        lines += [*row, EMPTY]
    return lines


def joined(signs: Iterable[Cell]) -> Line:
    """Return the same text with one cell for those in a row that are in one role."""
    return tuple(Cell("".join(sign.text for sign in run), role) for role, run in groupby(signs, lambda sign: sign.role))


def in_role(cells: Iterable[Cell], role: str) -> Line:
    """Return the same text in another role."""
    return tuple(Cell(cell.text, role) for cell in cells)


def marked(cells: Line, width: int) -> Line:
    """Return a line under the cursor: each role in its ``!`` variety, over the full width."""
    return tuple(Cell(cell.text, f"{cell.role}!") for cell in fitted(cells, width))


def wrapped(text: str, width: int) -> list[str]:
    """Fill lines of at most ``width`` columns; a word that is longer is broken."""
    lines: list[str] = []
    current = ""
    for word in _UNITS.sub("\\1\N{NO-BREAK SPACE}", " ".join(text.split())).split(" "):
        while cell_len(word) > width:
            head = set_cell_size(word, max(0, width - cell_len(current) - 1) if current else width).rstrip()
            if current and not head:
                lines.append(current)
                current = ""
                continue
            lines.append(f"{current} {head}" if current else head)
            word, current = word[len(head) :], ""
            if not head:
                break
        if current and cell_len(current) + 1 + cell_len(word) > width:
            lines.append(current)
            current = word
        else:
            current = f"{current} {word}" if current else word
    kept = [*lines, current] if current or not lines else lines
    return [words.replace("\N{NO-BREAK SPACE}", " ") for words in kept]


def paragraph(text: str, width: int, role: str = "", label: Cell | None = None, most: int = 0) -> list[Line]:
    """Return a text from outside filled to ``width``, hanging behind its label; at most ``most`` lines if given."""
    indent = cell_len(label.text) if label is not None else 0
    lines = wrapped(shown(text), max(8, width - indent))
    if most and len(lines) > most:
        lines = [*lines[: most - 1], cut(lines[most - 1] + " …", max(8, width - indent))]
    return [
        line(label if number == 0 and label is not None else " " * indent, Cell(words, role))
        for number, words in enumerate(lines)
    ]


# What a page draws: lines, and the places on them that answer to the mouse.


@dataclass(frozen=True, slots=True)
class Target:
    """A place that answers to the mouse."""

    y: int
    left: int
    right: int
    """Exclusive."""
    action: str
    """``page ranks``, ``select 5``, ``sort p50``."""


@dataclass(frozen=True, slots=True)
class Painting:
    """Lines, at most as many as there is room for."""

    lines: tuple[Line, ...]
    targets: tuple[Target, ...] = ()
    top: int = 0
    """First row of the table that is in sight."""
    rows: tuple[str, ...] = ()
    """Keys of all rows of the table in their order; the cursor moves over them."""


def stacked(height: int, *parts: Painting | Sequence[Line]) -> Painting:
    """Put parts below each other and cut them to ``height`` lines; the last table among them is the painting's."""
    lines: list[Line] = []
    targets: list[Target] = []
    top = 0
    rows: tuple[str, ...] = ()
    for part in parts:
        if isinstance(part, Painting):
            targets += [Target(one.y + len(lines), one.left, one.right, one.action) for one in part.targets]
            if part.rows:
                top, rows = part.top, part.rows
            lines += part.lines
        else:
            lines += part
    kept = tuple(lines[:height]) + (EMPTY,) * max(0, height - len(lines))
    return Painting(kept, tuple(target for target in targets if target.y < height), top, rows)


def scrolled(lines: Sequence[Line], first: int, height: int) -> Painting:
    """Return a page of text from its ``first`` line on, or as far as it goes."""
    top = max(0, min(first, len(lines) - height))
    return Painting(stacked(height, lines[top:]).lines, (), top)
