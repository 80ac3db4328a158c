"""The pages: their keys, their titles, what draws them and which keys do something there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddpdoctor.tui.draw.cells import EMPTY, Cell, Line, Painting, beside, line, paragraph, scrolled, stacked
from ddpdoctor.tui.screens.communication import paint_communication
from ddpdoctor.tui.screens.findings import paint_finding, paint_findings
from ddpdoctor.tui.screens.frame import FRAME_LINES, Tab, framed
from ddpdoctor.tui.screens.gpus import paint_gpus
from ddpdoctor.tui.screens.overview import paint_overview
from ddpdoctor.tui.screens.rank import paint_rank
from ddpdoctor.tui.screens.ranks import SORTS, paint_ranks
from ddpdoctor.tui.screens.sections import heading
from ddpdoctor.tui.screens.stall import paint_stall
from ddpdoctor.tui.view import View

# The page of keys.

_EVERYWHERE = (
    ("Enter", "open the selected row"),
    ("Esc", "back to where you were; clear the filter"),
    ("up down", "move; Page Up, Page Down, Home, End"),
    ("/", "filter the rows by words"),
    ("s  r", "sort by the next column; reverse"),
    ("space", "pause the display; the run continues"),
    (",  .", "one second back, forward"),
    ("e", "export: report, picture, trace or data"),
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


def paint_help(view: View, width: int, height: int) -> Painting:
    """Draw the keys and what the figures mean."""
    pages = (_TABS[0][0], ", ".join(tab.title for tab in TABS))
    half = (width - 3) // 2 if width >= SIDE_BY_SIDE else width
    keys = [heading("Keys", half, view.glyphs), *_listed((pages, *_EVERYWHERE))]
    more = [heading("On a rank, on a stall", half, view.glyphs), *_listed(_SPECIAL)]
    if view.playback is not None:
        more += [EMPTY, heading("In a recording", half, view.glyphs), *_listed(_PLAYBACK)]
    more += [EMPTY, heading("How to read it", half, view.glyphs), *_reading(view)]
    lines = beside(keys, more, half, 3) if width >= SIDE_BY_SIDE else [*keys, EMPTY, *more]
    return scrolled(lines, view.scroll, height)


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


Keys = tuple[tuple[str, str], ...]

TABS = (
    Tab("overview", "1", "Overview", "Over"),
    Tab("ranks", "2", "Ranks", "Ranks"),
    Tab("communication", "3", "Communication", "Comm"),
    Tab("gpus", "4", "GPUs", "GPUs"),
    Tab("findings", "5", "Findings", "Find"),
    Tab("stall", "6", "Stall", "Stall"),
)
_TABS: Keys = ((f"{TABS[0].key}-{TABS[-1].key}", "pages"),)
_ALWAYS: Keys = (("space", "pause"), (", .", "back, forward"), ("?", "help"), ("q", "quit"))
_ROWS: Keys = (("Enter", "open"), ("/", "filter"), ("s", "sort"), ("r", "reverse"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page."""

    name: str
    tab: str
    """The tab that stands out while it is shown."""
    paint: Callable[[View, int, int], Painting]
    keys: Keys = ()
    sorts: tuple[str, ...] = ()
    """Columns that ``s`` goes through."""
    scrolls: bool = False
    """It is a text, which the arrows move."""
    opens: str = ""
    """The page that Enter opens on the selected row."""


PAGES = {
    page.name: page
    for page in (
        Page(name="overview", tab="overview", paint=paint_overview, keys=(*_TABS, ("e", "export"))),
        Page(name="ranks", tab="ranks", paint=paint_ranks, keys=_ROWS, sorts=SORTS, opens="rank"),
        Page(name="rank", tab="ranks", paint=paint_rank, keys=(("Esc", "back"), ("t", "take stack")), scrolls=True),
        Page(name="communication", tab="communication", paint=paint_communication, keys=_TABS),
        Page(name="gpus", tab="gpus", paint=paint_gpus, keys=_TABS),
        Page(
            name="findings",
            tab="findings",
            paint=paint_findings,
            keys=(("Enter", "explain"), ("/", "filter"), ("e", "export")),
            opens="finding",
        ),
        Page(
            name="finding",
            tab="findings",
            paint=paint_finding,
            keys=(("Esc", "back"), ("e", "export")),
            scrolls=True,
        ),
        Page(
            name="stall",
            tab="stall",
            paint=paint_stall,
            keys=(("d", "dump stacks"), ("c", "copy"), ("e", "export"), ("k", "kill the job")),
        ),
        Page(name="help", tab="", paint=paint_help, keys=(("Esc", "back"),), scrolls=True),
    )
}


def paint_screen(view: View, width: int, height: int) -> Painting:
    """Draw a page with its frame."""
    page = PAGES[view.page]
    body = page.paint(view, width, max(1, height - FRAME_LINES))
    keys = [key for key in page.keys if _may_be_pressed(key[0], view)]
    return framed(view, TABS, (*keys, *_ALWAYS), page.tab, body, width)


def _may_be_pressed(key: str, view: View) -> bool:
    """Return whether a key can do anything: a recording has no job to end and no stack, an empty list has no row."""
    rows = {"ranks": view.snapshot.ranks, "findings": view.snapshot.findings}.get(view.page, True)
    if key in dict(_ROWS) and not rows:
        return False
    if key == "c":
        return view.snapshot.stall is not None
    return view.lives and (key == "t" or view.snapshot.launched) if key in ("k", "t") else True


def paint_defect(view: View, width: int, height: int, error: Exception) -> Painting:
    """Draw the frame of a page that cannot be drawn, and say so."""
    lines = paragraph(
        f"This page cannot be drawn because of a defect in ddpdoctor: {type(error).__name__}: {error}. The run is "
        "unaffected, and the other pages work.",
        width - 4,
        "warning",
        Cell("  "),
    )
    body = stacked(max(1, height - FRAME_LINES), lines)
    return framed(view, TABS, _ALWAYS, PAGES[view.page].tab, body, width)
