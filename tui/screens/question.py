"""A question in a box over a page."""

from __future__ import annotations

from dataclasses import dataclass

from ddpdoctor.tui.draw.cells import EMPTY, Cell, Line, fitted, line, paragraph
from ddpdoctor.tui.draw.glyphs import Glyphs
from ddpdoctor.tui.draw.painting import Painting

WIDTH = 60


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and the keys that answer it with what each does."""

    text: str
    answers: tuple[tuple[str, str], ...]


def overlaid(painting: Painting, question: Question, width: int, glyphs: Glyphs) -> Painting:
    """Draw the question over the middle of a painting; the mouse answers nothing meanwhile."""
    inner = min(WIDTH, width - 4)
    content: list[Line] = [EMPTY, *paragraph(question.text, inner - 4, "strong", Cell("  ")), EMPTY]
    content += [line(Cell(f"  {key:<5}", "key"), what) for key, what in question.answers]
    content.append(EMPTY)
    edge = Cell(glyphs.rule * inner, "edge.warning")
    side = Cell(glyphs.bar_between, "edge.warning")
    box: list[Line] = [(edge,), *((side, *fitted(cells, inner - 2), side) for cells in content), (edge,)]
    top = max(0, (len(painting.lines) - len(box)) // 2)
    left = max(0, (width - inner) // 2)
    lines = list(painting.lines)
    for number, cells in enumerate(box[: len(lines) - top]):
        under = fitted(lines[top + number], width)
        lines[top + number] = (*fitted(under, left, ""), *cells, *_behind(under, left + inner))
    return Painting(tuple(lines), (), painting.top, painting.rows)


def _behind(cells: Line, columns: int) -> Line:
    """Return what is left of a line behind its first ``columns`` columns."""
    head = fitted(cells, columns, "")
    kept = "".join(cell.text for cell in head)
    text = "".join(cell.text for cell in cells)
    rest = len(text) - len(kept)
    behind: list[Cell] = []
    for cell in reversed(cells):
        if rest <= 0:
            break
        piece = cell.text[-rest:]
        behind.insert(0, Cell(piece, cell.role))
        rest -= len(piece)
    return tuple(behind)
