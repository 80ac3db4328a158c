"""What the screen shows at one moment: a snapshot, and where the user is in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ddpdoctor.finding import shown_path
from ddpdoctor.monitor.snapshot import PlaybackState, RankView, Snapshot
from ddpdoctor.tui.draw.cells import Cell, shown
from ddpdoctor.tui.draw.figures import span
from ddpdoctor.tui.draw.glyphs import UNICODE, Glyphs
from ddpdoctor.tui.draw.table import Cursor

DIM_AFTER_NS = 3_000_000_000
AGE_SHOWN_AFTER_NS = 10_000_000_000

Freshness = Literal["fresh", "old", "stale", "unknown"]
"""``old`` figures are dimmed, ``stale`` ones say how old they are as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything that a painting depends on."""

    snapshot: Snapshot
    page: str = "overview"
    cursors: Mapping[str, Cursor] = field(default_factory=dict)
    """Cursor by page."""
    filters: Mapping[str, str] = field(default_factory=dict)
    """What the rows of a page have to contain."""
    opened: str = ""
    """Key of the rank or finding that is shown on a page of its own."""
    scroll: int = 0
    """First line in sight on a page of text."""
    typing: bool = False
    """The filter is being typed."""
    paused: bool = False
    """The display stands still; the run and its recording do not."""
    behind_ns: int = 0
    """How much older the snapshot is than the newest one."""
    silent_ns: int = 0
    """For how long the source has given no snapshot, by the screen's own clock."""
    playback: PlaybackState | None = None
    note: str = ""
    """What a key has just done."""
    explanation: str = ""
    """Documentation of the check whose finding is opened."""
    root: str = ""
    """Directory that paths are shown relative to."""
    glyphs: Glyphs = UNICODE
    coloured: bool = True

    @property
    def lives(self) -> bool:
        """The ranks are there, and asked from here: stacks can be taken."""
        return self.snapshot.source == "live" and self.snapshot.state != "ended"

    @property
    def cursor(self) -> Cursor:
        """The cursor of the page."""
        return self.cursors.get(self.page, Cursor())

    @property
    def filter(self) -> str:
        """The filter of the page."""
        return self.filters.get(self.page, "")

    def age(self, at_ns: int | None) -> tuple[Freshness, str]:
        """Return how fresh a figure of that time is, and its age in words if need be; all of an ended run is fresh."""
        if at_ns is None:
            return "unknown", ""
        if self.snapshot.state == "ended":
            return "fresh", ""
        age_ns = max(0, self.snapshot.now_ns - at_ns) + self.silent_ns
        if age_ns <= DIM_AFTER_NS:
            return "fresh", ""
        if age_ns <= AGE_SHOWN_AFTER_NS:
            return "old", ""
        return "stale", f"{span(age_ns)} old"

    def aged(self, text: str, at_ns: int | None, role: str = "") -> Cell:
        """Return a figure of that time, dimmed where it is old."""
        return Cell(text, "dim" if self.age(at_ns)[0] in {"old", "stale"} else role)

    def place(self, file: str, line: int) -> str:
        """Return a line of a file, cleaned, and relative to the root where it lies below it."""
        return f"{shown(shown_path(file, self.root) if self.root else file)}:{line}"

    def rank(self, key: str) -> RankView | None:
        """Return the rank of a row."""
        return next((rank for rank in self.snapshot.ranks if str(rank.rank) == key), None)
