"""Places text on lines of a given width: hanging indents, excerpts, columns. Everything is ``rich.text.Text``.

Markup is never parsed: text that comes from outside is only ever appended to a ``Text``, escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO
from typing import TYPE_CHECKING, cast

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from ddpdoctor.report.streams import one_line, without_commands

if TYPE_CHECKING:
    from rich.console import Console

# How figures of a run are written: None is —, never 0.

UNKNOWN = "—"


def milliseconds(ns: float | None) -> str:
    """Write a duration in milliseconds with three digits or so; from 10 s on in seconds, with the unit."""
    if ns is None:
        return UNKNOWN
    value = ns / 1e6
    if value >= 9_999.5:
        return f"{value / 1e3:.0f}s"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def in_milliseconds(ns: float | None) -> str:
    """Write a duration like ``milliseconds``, with the unit in any case."""
    text = milliseconds(ns)
    return text if text == UNKNOWN or text.endswith("s") else f"{text} ms"


def percent(share: float | None) -> str:
    """Write a share as a whole percentage."""
    return UNKNOWN if share is None else f"{share:.0%}"


def rate(value: float | None) -> str:
    """Write a number per second with three digits or so."""
    if value is None:
        return UNKNOWN
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def size(size_bytes: float | None) -> str:
    """Write a size in powers of ten: ``4.2 MB``."""
    if size_bytes is None:
        return UNKNOWN
    for unit, factor in (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12)):
        if size_bytes < 999.5 * factor or unit == "TB":
            value = size_bytes / factor
            return f"{value:,.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"
    raise AssertionError("unreachable")


def seconds(ns: float) -> str:
    """Write a time span in the unit that suits it."""
    value = ns / 1e9
    if value < 120:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7_200 else f"{value / 3_600:.1f} h"


def share_of(part: float | None, whole: float | None) -> float | None:
    """Return a part of a whole; None where either is not known."""
    return None if part is None or not whole else part / whole


def added(one: float | None, other: float | None) -> float | None:
    """Return the sum of what is known; None where nothing is."""
    return None if one is None and other is None else (one or 0.0) + (other or 0.0)


GAP = " | "
"""Between two columns."""
_NO_CONSOLE = cast("Console", None)
"""``Text.wrap`` hands its console on to text that is justified, which none is here: one takes 8 ms to load, of the
150 that ``check --static`` takes (rich 15)."""


def paragraph(text: Text, width: int, label: Text | None = None, indent: int = 2, *, fold: bool = True) -> list[Text]:
    """Wrap ``text`` to ``width`` columns behind ``indent`` spaces; ``label`` stands in the indent of the first line.

    A word that is longer than a line is broken, or without ``fold`` left whole: a path has to be clickable.
    """
    wrapped = text.wrap(_NO_CONSOLE, max(20, width - indent), overflow="fold" if fold else "ignore", no_wrap=False)
    lines = []
    for number, line in enumerate(wrapped):
        line.rstrip()
        first = label if number == 0 and label is not None else Text()
        lines.append(Text.assemble(first, " " * (indent - first.cell_len), line))
    return lines


def note_lines(notes: Iterable[str], width: int) -> list[Text]:
    """Return sentences from outside, each as a note."""
    return [line for note in notes for line in paragraph(Text(one_line(note)), width, Text("note", "bold"), indent=6)]


def cut(text: str, width: int) -> str:
    """Shorten ``text`` to ``width`` columns, its end replaced by dots."""
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 3)).rstrip() + "..."


def cut_left(text: str, width: int) -> str:
    """Shorten ``text`` to ``width`` columns, its beginning replaced by dots: the end of a path says more."""
    while cell_len(text) > width and len(text) > 4:
        text = "..." + text[4:].lstrip(".")
    return text


def spaced(blocks: Iterable[Sequence[Text]]) -> list[Text]:
    """Return the lines of blocks, with an empty one between those that have any."""
    lines: list[Text] = []
    for block in filter(None, blocks):
        lines += [Text(), *block] if lines else block
    return lines


def side_by_side(blocks: Sequence[Sequence[Text]], column_width: int) -> list[Text]:
    """Put blocks of lines, each at most ``column_width`` wide, beside each other."""
    lines = []
    for row in range(max(map(len, blocks), default=0)):
        line = Text("  ")
        for number, block in enumerate(blocks):
            cell = block[row] if row < len(block) else Text()
            if number:
                line.append(GAP, "dim")
            line.append_text(cell)
            if number < len(blocks) - 1:
                line.append(" " * (column_width - cell.cell_len))
        line.rstrip()
        lines.append(line)
    return lines


def to_string(lines: Iterable[Text], *, colour: bool) -> str:
    """Write lines as they are, one line feed after each, with or without the terminal's colours."""
    if not colour:
        return "".join(f"{without_commands(line.plain)}\n" for line in lines)
    from rich.console import Console

    stream = StringIO()
    console = Console(
        file=stream,
        width=10_000,
        force_terminal=True,
        color_system="standard",
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
        _environ={},
    )
    for line in lines:
        harmless = without_commands(line.plain)
        if harmless != line.plain:
            line = Text(harmless, line.style)
        console.print(line, soft_wrap=True)
    return stream.getvalue()
