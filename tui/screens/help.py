"""The page of keys."""

from __future__ import annotations

from collections.abc import Sequence

from ddpdoctor.tui.draw.cells import EMPTY, Cell, Line, beside, line
from ddpdoctor.tui.draw.painting import Painting, stacked
from ddpdoctor.tui.screens.frame import Tab
from ddpdoctor.tui.screens.sections import heading
from ddpdoctor.tui.view import View

_EVERYWHERE = (
    ("Enter", "open the selected row"),
    ("Esc", "back; clear the filter"),
    ("up down", "move; Page Up, Page Down, Home, End"),
    ("/", "filter the rows by words"),
    ("s  r", "sort by the next column; reverse"),
    ("space", "pause the display; the run continues"),
    (",  .", "one second back, forward"),
    ("e", "export what is shown to a file"),
    ("b", "dark, light"),
    ("Ctrl+P", "all commands"),
    ("q", "quit; an attached job continues"),
)
_SPECIAL = (
    ("t", "take the stack of the opened rank"),
    ("d", "dump the stacks of all ranks to a file"),
    ("c", "copy the stall to the clipboard"),
    ("k", "kill the job if it was started here; asks first"),
)
_PLAYBACK = (
    ("left right", "10 s back, forward"),
    ("+  -", "faster, slower"),
    ("space", "pause, resume"),
)
SIDE_BY_SIDE = 110
NAME_WIDTH = 12


def paint_help(tabs: Sequence[Tab], view: View, width: int, height: int) -> Painting:
    """Draw the keys and what the figures mean."""
    pages = (f"{tabs[0].key}-{tabs[-1].key}", ", ".join(tab.title for tab in tabs))
    half = (width - 3) // 2 if width >= SIDE_BY_SIDE else width
    keys = [heading("Keys", half, view.glyphs), *_listed((pages, *_EVERYWHERE))]
    more = [heading("On a rank, on a stall", half, view.glyphs), *_listed(_SPECIAL)]
    if view.playback is not None:
        more += [EMPTY, heading("In a recording", half, view.glyphs), *_listed(_PLAYBACK)]
    more += [EMPTY, heading("How to read it", half, view.glyphs), *_reading(view)]
    lines = beside(keys, more, half, 3) if width >= SIDE_BY_SIDE else [*keys, EMPTY, *more]
    top = max(0, min(view.scroll, len(lines) - height))
    return Painting(stacked(height, lines[top:]).lines, (), top)


def _listed(keys: tuple[tuple[str, str], ...]) -> list[Line]:
    return [line(Cell(f"  {key:<{NAME_WIDTH}}", "key"), words) for key, words in keys]


def _reading(view: View) -> list[Line]:
    return [
        line(Cell(f"  {view.glyphs.unknown:<{NAME_WIDTH}}", "key"), "not known"),
        line(Cell(f"  {'dimmed':<{NAME_WIDTH}}", "key"), "older than 3 s; from 10 s on the age is shown"),
        line(Cell(f"  {view.glyphs.culprit:<{NAME_WIDTH}}", "key"), "the rank that the others wait for"),
        line(Cell(f"  {'exposed':<{NAME_WIDTH}}", "key"), "communication that no computation hides"),
        line(Cell(f"  {'overlap':<{NAME_WIDTH}}", "key"), "the share of communication that is hidden"),
    ]
