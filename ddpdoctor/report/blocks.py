"""What a command says of runs, piece by piece: laid out in columns for a terminal, and as tables for a page.

One description serves both, so that the page never says less than the terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from rich.cells import cell_len
from rich.text import Text

from ddpdoctor.report.layout import paragraph, spaced, to_string
from ddpdoctor.report.streams import one_line

_BETWEEN = 2
"""Blanks between two columns."""
_STYLES = {"good": "green", "bad": "red", "doubt": "yellow", "quiet": "dim", "": ""}


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """A paragraph; the label stands in bold before it."""

    text: str
    label: str = ""
    tone: str = ""
    """``good``, ``bad``, ``doubt``, ``quiet`` or none."""
    strong: bool = False
    indent: int = 0
    """Columns of a terminal from which the text is laid out: its label stands there."""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Rows under a heading; a row that has fewer cells is one sentence behind its first."""

    title: str = ""
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    quiet: frozenset[int] = frozenset()
    """Numbers of the rows that mean nothing, such as noise."""
    figures: frozenset[int] = frozenset()
    """Numbers of the columns that are aligned right."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that could be done: what it brings, its title, and what else is known of it by a word each."""

    gain: str
    tone: str
    title: str
    facts: tuple[tuple[str, str], ...] = ()


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """A drawing: rows of characters for a terminal, SVG for a page."""

    rows: tuple[str, ...]
    svg: str


Block = Said | Table | Change | Plot


def lines_of(blocks: Iterable[Block], width: int) -> list[Text]:
    """Lay blocks out for ``width`` columns."""
    lines: list[Text] = []
    for block in blocks:
        if isinstance(block, Said):
            lines += _said(block, width)
        elif isinstance(block, Table):
            lines += _table(block, width)
        elif isinstance(block, Change):
            lines += _change(block, width)
        else:
            lines += map(Text, block.rows)
    return lines


def _said(block: Said, width: int) -> list[Text]:
    style = " ".join(filter(None, ("bold" if block.strong else "", _STYLES[block.tone])))
    text = Text(one_line(block.text), style if not block.label else "")
    label = Text(block.label, f"bold {_STYLES[block.tone]}".strip()) if block.label else None
    return paragraph(text, width, label, block.indent)


def _table(block: Table, width: int) -> list[Text]:
    whole = [row for row in (block.head, *block.rows) if len(row) == len(block.head)]
    widths = [max(cell_len(one_line(row[column])) for row in whole) for column in range(len(block.head))]
    lines = [Text(one_line(block.title), "bold")] if block.title else []
    for number, row in enumerate((block.head, *block.rows), -1):
        if len(row) < len(block.head):
            lines += paragraph(Text(one_line(row[1]), "bold red"), width, Text(row[0]), widths[0] + _BETWEEN)
            continue
        cells = (
            " " * (wide - cell_len(cell)) + cell if column in block.figures else cell + " " * (wide - cell_len(cell))
            for column, (cell, wide) in enumerate(zip(map(one_line, row), widths, strict=True))
        )
        lines.append(Text((" " * _BETWEEN).join(cells).rstrip(), "dim" if number in block.quiet else ""))
    return lines


_GAINS = 20
_FACTS = 10


def _change(block: Change, width: int) -> list[Text]:
    style = f"bold {_STYLES[block.tone]}".strip()
    lines = paragraph(Text(one_line(block.title), "bold"), width, Text(f"{block.gain:<{_GAINS}}", style), _GAINS)
    for name, text in block.facts:
        lines += paragraph(Text(one_line(text)), width, Text(f"    {name}", "dim"), _FACTS)
    return lines


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """All that a command says: its name, its answer in one sentence, groups of blocks with a blank line between."""

    name: str
    answer: str
    tone: str = ""
    groups: tuple[Sequence[Block], ...]


def rendered(page: Page, width: int, *, colour: bool) -> str:
    """Render for a terminal of ``width`` columns."""
    return to_string(spaced(lines_of(group, width) for group in page.groups), colour=colour)


def notes(texts: Iterable[str]) -> list[Said]:
    """Return the notes at the end, in their form."""
    return [Said(label="note", text=text, indent=6) for text in texts]
