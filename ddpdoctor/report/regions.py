"""Regions of files for formats that want all four numbers."""

from __future__ import annotations

import msgspec

from ddpdoctor.files.source_text import line_of
from ddpdoctor.finding import Location


class Region(msgspec.Struct, frozen=True):
    """Lines and columns, 1-based, counted in characters; ``end_column`` is exclusive."""

    line: int
    column: int
    end_line: int
    end_column: int


def region_of(location: Location) -> Region:
    """Complete a location of which only the line is known with the extent of that line's code."""
    line = max(1, location.line)
    if location.end_line >= line and location.end_column > 0:
        return Region(line, max(1, location.column), location.end_line, location.end_column)
    code = line_of(location.file, line)
    column = location.column
    if column <= 1:
        column = 1 + len(code) - len(code.lstrip())
    return Region(line, column, line, max(column + 1, len(code.rstrip()) + 1))
