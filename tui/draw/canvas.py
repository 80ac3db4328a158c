"""The one widget of the screen: draws lines, and sends to the terminal only the columns that changed."""

from __future__ import annotations

from typing import ClassVar

from rich.segment import Segment
from textual import events
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from ddpdoctor.tui.draw.cells import EMPTY, Line, width_of
from ddpdoctor.tui.draw.glyphs import plain_text
from ddpdoctor.tui.draw.painting import Painting
from ddpdoctor.tui.draw.palette import Palette


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
