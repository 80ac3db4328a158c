"""What several formats say alike: a heading and its counts, a finding in one sentence, its region of a file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

import msgspec

from ddpdoctor.examination import Examination
from ddpdoctor.files.untrusted import line_of
from ddpdoctor.finding import Basis, Fact, Finding, Frame, Location, Severity, rank_list, shown_path
from ddpdoctor.report.streams import one_line, visible

SEEN: dict[Basis, str] = {
    "run": "in the run",
    "log": "in the logs",
    "dump": "in the dumps",
    "rehearsal": "in the rehearsal",
    "source": "in the source",
}
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


def place_of(place: Location | Frame, root: str) -> str:
    """Return file and line, relative to ``root`` where the file is below it."""
    return f"{one_line(shown_path(place.file, root))}:{place.line}"


def whereabouts(finding: Finding, root: str) -> str:
    """Return where a finding is and on which ranks, as far as that is known."""
    words = []
    if finding.location is not None:
        function = finding.location.function
        words.append(place_of(finding.location, root) + (f" in {one_line(function)}" if function else ""))
    if finding.ranks:
        words.append(rank_list(finding.ranks))
    return ", ".join(words)


def excerpt(location: Location | None, most: int) -> list[tuple[int, str]]:
    """Return the lines of code of a location with their numbers, at most so many; none where there is nothing."""
    if location is None:
        return []
    last = min(max(location.line, location.end_line), location.line + most - 1)
    numbers = range(location.line, last + 1)
    code = textwrap.dedent("\n".join(visible(line_of(location.file, number)) for number in numbers)).split("\n")
    return list(zip(numbers, code, strict=True)) if any(line.strip() for line in code) else []


def stacks_of(finding: Finding) -> list[Fact]:
    """Return the facts to be shown beside each other: what each of several ranks did, with its stack."""
    facts = [fact for fact in finding.evidence if fact.rank is not None and fact.stack]
    return facts if len({fact.rank for fact in facts}) > 1 else []


def alike(facts: Iterable[Fact]) -> dict[tuple[str, tuple[Frame, ...]], list[int]]:
    """Return what ranks did, in words and with the stack, and which ranks did the same."""
    found: dict[tuple[str, tuple[Frame, ...]], list[int]] = {}
    for fact in facts:
        if fact.rank is not None:
            said = one_line(fact.text).removeprefix(f"rank {fact.rank} ")
            found.setdefault((said, fact.stack), []).append(fact.rank)
    return found


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
