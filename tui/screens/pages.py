"""The pages: their keys, their titles, what draws them and which keys do something there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ddpdoctor.tui.draw.cells import Cell, paragraph
from ddpdoctor.tui.draw.painting import Painting, stacked
from ddpdoctor.tui.screens.communication import paint_communication
from ddpdoctor.tui.screens.findings import paint_finding, paint_findings
from ddpdoctor.tui.screens.frame import FRAME_LINES, Tab, framed
from ddpdoctor.tui.screens.gpus import paint_gpus
from ddpdoctor.tui.screens.help import paint_help
from ddpdoctor.tui.screens.overview import paint_overview
from ddpdoctor.tui.screens.rank import paint_rank
from ddpdoctor.tui.screens.ranks import SORTS, paint_ranks
from ddpdoctor.tui.screens.stall import paint_stall
from ddpdoctor.tui.view import View

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
    back: str = ""
    """The page that Esc goes back to."""
    opens: str = ""
    """The page that Enter opens on the selected row."""


PAGES = {
    page.name: page
    for page in (
        Page(name="overview", tab="overview", paint=paint_overview, keys=(*_TABS, ("e", "export"))),
        Page(name="ranks", tab="ranks", paint=paint_ranks, keys=_ROWS, sorts=SORTS, opens="rank"),
        Page(name="rank", tab="ranks", paint=paint_rank, keys=(("Esc", "back"), ("t", "take stack")), back="ranks"),
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
            back="findings",
        ),
        Page(
            name="stall",
            tab="stall",
            paint=paint_stall,
            keys=(("d", "dump stacks"), ("c", "copy"), ("e", "export"), ("k", "kill the job")),
        ),
        Page(name="help", tab="", paint=partial(paint_help, TABS), keys=(("Esc", "back"),), back="overview"),
    )
}


def paint_screen(view: View, width: int, height: int) -> Painting:
    """Draw a page with its frame."""
    page = PAGES[view.page]
    body = page.paint(view, width, max(1, height - FRAME_LINES))
    return framed(view, TABS, (*page.keys, *_ALWAYS), page.tab, body, width)


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
