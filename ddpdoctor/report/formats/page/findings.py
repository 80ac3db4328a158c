"""Findings as the template of the HTML report takes them: text that is shown as it is, and what stands beside what."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import msgspec

from ddpdoctor.files.source_text import line_of
from ddpdoctor.finding import Basis, Fact, Finding, Frame, Location
from ddpdoctor.findings.locations import in_user_code, named_ranks, shown_path
from ddpdoctor.report.escape import one_line, visible
from ddpdoctor.report.finding_fields import doubt_of, place_of

EXCERPT_LINES = 12
FRAMES = 40
_SEEN: dict[Basis, str] = {
    "source": "in the source",
    "rehearsal": "in the rehearsal",
    "run": "in the run",
    "log": "in the logs",
    "dump": "in the dumps",
}


class CodeLine(msgspec.Struct, frozen=True):
    """A numbered line of the user's."""

    number: int
    text: str


class FrameView(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a stack."""

    place: str
    function: str
    code: str
    own: bool
    """It is in the user's code."""


class SideView(msgspec.Struct, frozen=True, kw_only=True):
    """What some ranks did, to be shown beside what others did."""

    ranks: str
    text: str
    frames: tuple[FrameView, ...]


class FactView(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of evidence."""

    text: str
    where: str
    seen: str


class FindingPage(msgspec.Struct, frozen=True, kw_only=True):
    """A finding, ready to be shown."""

    anchor: str
    severity: str
    code: str
    name: str
    title: str
    where: str
    doubt: str
    excerpt: tuple[CodeLine, ...]
    sides: tuple[SideView, ...]
    facts: tuple[FactView, ...]
    remedy: str


def pages_of(findings: Sequence[Finding], root: str) -> tuple[FindingPage, ...]:
    """Lay out findings; their anchors are their numbers, so that they are unique."""
    return tuple(_page(finding, root, f"finding-{number}") for number, finding in enumerate(findings, 1))


def _page(finding: Finding, root: str, anchor: str) -> FindingPage:
    sides = _sides(finding, root)
    shown = [fact for fact in finding.evidence if not (sides and fact.rank is not None and fact.stack)]
    return FindingPage(
        anchor=anchor,
        severity=finding.severity.value,
        code=one_line(finding.code),
        name=one_line(finding.name),
        title=one_line(finding.title),
        where=_where(finding, root),
        doubt=one_line(finding.unconfirmed) or doubt_of(finding) or one_line(finding.doubt),
        excerpt=() if sides else _excerpt(finding.location),
        sides=sides,
        facts=tuple(_fact(fact, root) for fact in shown),
        remedy=one_line(finding.advice),
    )


def _where(finding: Finding, root: str) -> str:
    place = finding.location
    words = (
        [] if place is None else [place_of(place, root) + (f" in {one_line(place.function)}" if place.function else "")]
    )
    return ", ".join([*words, *([named_ranks(finding.ranks)] if finding.ranks else [])])


def _excerpt(location: Location | None) -> tuple[CodeLine, ...]:
    if location is None:
        return ()
    last = min(max(location.line, location.end_line), location.line + EXCERPT_LINES - 1)
    numbers = range(location.line, last + 1)
    code = textwrap.dedent("\n".join(visible(line_of(location.file, number)) for number in numbers)).split("\n")
    return tuple(map(CodeLine, numbers, code)) if any(line.strip() for line in code) else ()


def _sides(finding: Finding, root: str) -> tuple[SideView, ...]:
    """Return what each of several ranks did; ranks that did the same share a column."""
    alike: dict[tuple[str, tuple[Frame, ...]], list[int]] = {}
    for fact in finding.evidence:
        if fact.rank is not None and fact.stack:
            said = one_line(fact.text).removeprefix(f"rank {fact.rank} ")
            alike.setdefault((said, fact.stack), []).append(fact.rank)
    if len({rank for ranks in alike.values() for rank in ranks}) < 2:
        return ()
    return tuple(
        SideView(ranks=named_ranks(ranks), text=said, frames=tuple(_frame(frame, root) for frame in stack[:FRAMES]))
        for (said, stack), ranks in alike.items()
    )


def _frame(frame: Frame, root: str) -> FrameView:
    return FrameView(
        place=f"{one_line(shown_path(frame.file, root))}:{frame.line}",
        function=one_line(frame.function),
        code=visible(line_of(frame.file, frame.line)).strip()[:300],
        own=in_user_code(frame.file),
    )


def _fact(fact: Fact, root: str) -> FactView:
    where = ""
    if fact.stack:
        where = " ← ".join(f"{one_line(shown_path(frame.file, root))}:{frame.line}" for frame in fact.stack[:FRAMES])
    elif fact.location is not None:
        where = place_of(fact.location, root)
    text = one_line(fact.text)
    return FactView(text=text, where="" if where and where in text else where, seen=_SEEN[fact.basis])
