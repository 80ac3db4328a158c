"""What is shown before the first snapshot."""

from __future__ import annotations

from ddpdoctor.tui.draw.cells import EMPTY, Cell, Line, cut, line, shown
from ddpdoctor.tui.draw.painting import Painting, stacked


def paint_starting(width: int, height: int, note: str) -> Painting:
    """Draw that the run is looked for, and what stands in the way."""
    lines: list[Line] = [line(Cell(" ddpdoctor ", "tab.on"), Cell(" looking at the run", "strong"))]
    if note:
        lines += [EMPTY, line(Cell(f"  {cut(shown(note), width - 4)}", "warning"))]
    return stacked(height, lines)
