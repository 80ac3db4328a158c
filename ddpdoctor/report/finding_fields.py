"""Fields of a finding as several formats have them: one sentence, and a region of a file with all four numbers."""

from __future__ import annotations

import msgspec

from ddpdoctor.files.source_text import line_of
from ddpdoctor.finding import Finding, Location
from ddpdoctor.findings.locations import shown_path
from ddpdoctor.report.escape import one_line


def stated(finding: Finding) -> str:
    """Return the title, and in brackets whether a rehearsal has yet to confirm it."""
    doubt = doubt_of(finding)
    return one_line(f"{finding.title} ({doubt})" if doubt else finding.title)


def doubt_of(finding: Finding) -> str:
    """``not rehearsed``, ``not confirmed``, ``not certain``, ``echo``; empty where there is no such doubt."""
    if finding.role == "echo":
        return "echo"
    return one_line(finding.unconfirmed.partition(":")[0]) or ("not certain" if finding.doubt else "")


def place_of(location: Location, root: str) -> str:
    """Return file and line, relative to ``root`` where the file is below it."""
    return f"{one_line(shown_path(location.file, root))}:{location.line}"


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
