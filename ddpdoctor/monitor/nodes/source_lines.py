"""The source lines that are shown with a snapshot, for a screen elsewhere: it has other files, or none."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from ddpdoctor.files.source_text import line_of
from ddpdoctor.finding import Finding
from ddpdoctor.monitor.snapshot import Snapshot

MOST_LINES = 2_000
LONGEST_LINE = 500
LINES_OF_A_PLACE = 12
FRAMES_OF_A_STACK = 40
"""As many as a report shows at most."""


def lines_shown(snapshot: Snapshot) -> dict[str, dict[int, str]]:
    """Return the lines that a screen or a report of it may show, by file and number, as they are in the files of this
    machine.

    What the other nodes say names these files, so none is read but Python's.
    """
    found: dict[str, dict[int, str]] = {}
    for file, line in islice(dict.fromkeys(_places(snapshot)), MOST_LINES):
        text = line_of(file, line) if file.endswith(".py") else ""
        if text:
            found.setdefault(file, {})[line] = text[:LONGEST_LINE]
    return found


def _places(snapshot: Snapshot) -> Iterator[tuple[str, int]]:
    """Yield where these lines are; what matters most comes first."""
    sides = () if snapshot.stall is None else snapshot.stall.sides
    findings = [view.finding for view in snapshot.findings]
    if snapshot.cause is not None:
        findings.insert(0, snapshot.cause)
    stacks = (
        *(side.stack for side in sides),
        *(fact.stack for finding in findings for fact in finding.evidence),
        *(rank.stack for rank in snapshot.ranks),
    )
    yield from chain.from_iterable(map(_lines_of_place, findings))
    for stack in stacks:
        for frame in stack[:FRAMES_OF_A_STACK]:
            yield frame.file, frame.line


def _lines_of_place(finding: Finding) -> Iterator[tuple[str, int]]:
    place = finding.location
    if place is not None:
        last = min(max(place.line, place.end_line), place.line + LINES_OF_A_PLACE - 1)
        for number in range(place.line, last + 1):
            yield place.file, number
