"""What was seen lately: the newest snapshot, those before it, and which one is on display."""

from __future__ import annotations

from collections import deque
from typing import ClassVar

from rich.segment import Segment
from textual import events
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from ddpdoctor.monitor.snapshot import Snapshot
from ddpdoctor.tui.draw.cells import EMPTY, Line, Painting, width_of
from ddpdoctor.tui.draw.glyphs import Palette, plain_text

# The one widget of the screen: draws lines, and sends to the terminal only the columns that changed.


class Canvas(Widget, can_focus=True):
    """Shows a painting."""

    ALLOW_SELECT: ClassVar[bool] = False

    class Resized(Message):
        """There is another amount of room."""

    class Chosen(Message):
        """A place was clicked that answers to the mouse, or the wheel was turned."""

        def __init__(self, action: str) -> None:
            self.action = action
            super().__init__()

    def __init__(self, palette: Palette, *, plain: bool) -> None:
        self._palette = palette
        self._plain = plain
        self._painting = Painting(())
        self._strips: list[Strip] = []
        super().__init__()

    def show(self, painting: Painting) -> None:
        """Draw a painting in place of the last one."""
        before = self._painting.lines
        self._painting = painting
        changed: list[Region] = []
        for y, cells in enumerate(painting.lines):
            old = before[y] if y < len(before) else None
            if old == cells and y < len(self._strips):
                continue
            strip = self._strip(cells)
            if y < len(self._strips):
                changed.append(_difference(self._strips[y], strip, y, self.size.width))
                self._strips[y] = strip
            else:
                changed.append(Region(0, y, self.size.width, 1))
                self._strips.append(strip)
        for y in range(len(painting.lines), len(self._strips)):
            changed.append(Region(0, y, self.size.width, 1))
        del self._strips[len(painting.lines) :]
        changed = [region for region in changed if region.width > 0]
        if changed:
            self.refresh(*changed)

    def recolour(self, palette: Palette) -> None:
        """Draw everything in other colours from now on."""
        self._palette = palette
        self._strips = [self._strip(cells) for cells in self._painting.lines]
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Return the strip of one line."""
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width, self._palette.style(""))

    def on_resize(self, event: events.Resize) -> None:
        """Have everything drawn for the new size."""
        self._strips = []
        self.post_message(self.Resized())

    def on_click(self, event: events.Click) -> None:
        """Say what was clicked."""
        for target in reversed(self._painting.targets):
            if target.y == event.y and target.left <= event.x < target.right:
                self.post_message(self.Chosen(target.action))
                return

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Move down."""
        self.post_message(self.Chosen("move 3"))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Move up."""
        self.post_message(self.Chosen("move -3"))

    def _strip(self, cells: Line) -> Strip:
        style = self._palette.style
        width = self.size.width
        segments = [
            Segment(plain_text(cell.text) if self._plain else cell.text, style(cell.role)) for cell in cells or EMPTY
        ]
        return Strip(segments, width_of(cells)).adjust_cell_length(width, style(""))


def _difference(old: Strip, new: Strip, y: int, width: int) -> Region:
    """Return the columns of a line that changed."""
    before, after = list(old), list(new)
    left = 0
    while before and after and before[0] == after[0]:
        left += after[0].cell_length
        del before[0], after[0]
    right = width
    while before and after and before[-1] == after[-1]:
        right -= after[-1].cell_length
        del before[-1], after[-1]
    return Region(left, y, max(0, right - left), 1)


KEPT_EVERY_NS = 1_000_000_000
KEPT_RANKS = 4_800
"""Snapshots times ranks that are kept: 10 minutes of 8 ranks; a big job gets fewer, so that memory stays flat."""
KEPT_MOST = 600
KEPT_LEAST = 10


class Timeline:
    """Keeps one snapshot a second, and where the display stands among them."""

    def __init__(self) -> None:
        self._kept: deque[Snapshot] = deque()
        self._newest: Snapshot | None = None
        self._shown: Snapshot | None = None
        """None: the newest one."""

    @property
    def newest(self) -> Snapshot | None:
        """The last snapshot that came."""
        return self._newest

    @property
    def shown(self) -> Snapshot | None:
        """The snapshot on display."""
        return self._shown or self._newest

    @property
    def paused(self) -> bool:
        """The display stands still."""
        return self._shown is not None

    @property
    def behind_ns(self) -> int:
        """How much older the display is than the newest snapshot."""
        if self._shown is None or self._newest is None:
            return 0
        return max(0, self._newest.now_ns - self._shown.now_ns)

    def add(self, snapshot: Snapshot) -> None:
        """Take a new snapshot."""
        if self._newest is not None and snapshot.now_ns < self._newest.now_ns:
            # The time of a replay was moved back: what comes later has not happened yet.
            self._kept.clear()
        self._newest = snapshot
        if not self._kept or snapshot.now_ns - self._kept[-1].now_ns >= KEPT_EVERY_NS:
            self._kept.append(snapshot)
        most = max(KEPT_LEAST, min(KEPT_MOST, KEPT_RANKS // max(1, len(snapshot.ranks))))
        while len(self._kept) > most:
            self._kept.popleft()

    def pause(self) -> None:
        """Hold the display; the snapshots continue."""
        self._shown = self.shown

    def resume(self) -> None:
        """Follow the newest snapshot again."""
        self._shown = None

    def step(self, steps: int) -> None:
        """Go back (negative) or forward among the kept snapshots; forward beyond the newest follows it again."""
        shown = self.shown
        if shown is None:
            return
        if steps < 0:
            earlier = [one for one in self._kept if one.now_ns < shown.now_ns]
            self._shown = earlier[max(steps, -len(earlier))] if earlier else shown
            return
        later = [one for one in self._kept if one.now_ns > shown.now_ns]
        self._shown = later[steps - 1] if len(later) >= steps else None
