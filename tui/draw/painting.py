"""What a page draws: lines, and the places on them that answer to the mouse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpdoctor.tui.draw.cells import EMPTY, Line


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
