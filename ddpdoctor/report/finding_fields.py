"""What several formats say alike: a heading and its counts, a finding in one sentence, its region of a file."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ddpdoctor.examination import Examination
from ddpdoctor.files.untrusted import line_of
from ddpdoctor.finding import Finding, Location, Severity, shown_path
from ddpdoctor.report.streams import one_line

_PLURALS = {Severity.ERROR: "errors", Severity.WARNING: "warnings", Severity.ADVICE: "advice"}
_OF_A_GATE = {"clean": "passed", "findings": "failed", "inconclusive": "inconclusive"}


def counted(findings: Iterable[Finding]) -> str:
    """Return how many there are of each severity, such as ``1 error and 2 warnings``; empty for none."""
    severities = [finding.severity for finding in findings]
    numbers = {severity: severities.count(severity) for severity in Severity if severity in severities}
    counts = [
        f"{number} {severity.value if number == 1 else _PLURALS[severity]}" for severity, number in numbers.items()
    ]
    return " and ".join(filter(None, [", ".join(counts[:-1]), *counts[-1:]]))


def headline(examination: Examination) -> str:
    """Return the verdict in a few words, a gate's as one."""
    found = counted(examination.findings)
    gates = [part.gate for part in examination.parts or (examination,) if part.gate is not None]
    if gates:
        written = examination.verdict == "clean" and all(gate.written for gate in gates)
        word = "baseline written" if written else f"gate {_OF_A_GATE[examination.verdict]}"
        return f"{word}: {found}" if found else word
    if examination.verdict == "inconclusive":
        return f"inconclusive: {found}" if found else "inconclusive"
    return found or "nothing found"


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
