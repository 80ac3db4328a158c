"""The report as one page of HTML: nothing is loaded from outside, no script runs, and it prints.

All text is escaped by the template library; the page's own policy forbids scripts and requests besides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor import __version__
from ddpdoctor.check import LoadedCheck, OutcomeState
from ddpdoctor.examination import Examination, Figure
from ddpdoctor.files import regex
from ddpdoctor.files.untrusted import line_of
from ddpdoctor.finding import Fact, Finding, Frame, in_user_code, rank_list
from ddpdoctor.gate.budget import amount, share
from ddpdoctor.report import explanation
from ddpdoctor.report.finding_fields import (
    SEEN,
    alike,
    doubt_of,
    excerpt,
    headline,
    place_of,
    stacks_of,
    whereabouts,
)
from ddpdoctor.report.formats.concise import leaves_doubt, why_incomplete
from ddpdoctor.report.layout import in_milliseconds
from ddpdoctor.report.streams import one_line, visible

if TYPE_CHECKING:
    from jinja2 import Template

    from ddpdoctor.monitor.snapshot import RankView, Snapshot
    from ddpdoctor.report.blocks import Page

# Findings as the template takes them: text that is shown as it is, and what stands beside what.

EXCERPT_LINES = 12
FRAMES = 40


def _pages_of(findings: Sequence[Finding], root: str) -> list[dict[str, Any]]:
    """Lay out findings; their anchors are their numbers, so that they are unique."""
    return [_page(finding, root, f"finding-{number}") for number, finding in enumerate(findings, 1)]


def _page(finding: Finding, root: str, anchor: str) -> dict[str, Any]:
    stacks = stacks_of(finding)
    return {
        "anchor": anchor,
        "severity": finding.severity.value,
        "code": one_line(finding.code),
        "name": one_line(finding.name),
        "title": one_line(finding.title),
        "where": whereabouts(finding, root),
        "doubt": one_line(finding.unconfirmed) or doubt_of(finding) or one_line(finding.doubt),
        "excerpt": [] if stacks else excerpt(finding.location, EXCERPT_LINES),
        "sides": [
            {"ranks": rank_list(ranks), "text": said, "frames": [_frame(frame, root) for frame in stack[:FRAMES]]}
            for (said, stack), ranks in alike(stacks).items()
        ],
        "facts": [_fact(fact, root) for fact in finding.evidence if fact not in stacks],
        "remedy": one_line(finding.advice),
    }


def _frame(frame: Frame, root: str) -> dict[str, Any]:
    return {
        "place": place_of(frame, root),
        "function": one_line(frame.function),
        "code": visible(line_of(frame.file, frame.line)).strip()[:300],
        "own": in_user_code(frame.file),
    }


def _fact(fact: Fact, root: str) -> dict[str, str]:
    where = ""
    if fact.stack:
        where = " ← ".join(place_of(frame, root) for frame in fact.stack[:FRAMES])
    elif fact.location is not None:
        where = place_of(fact.location, root)
    text = one_line(fact.text)
    return {"text": text, "where": "" if where and where in text else where, "seen": SEEN[fact.basis]}


# The bars of the HTML report: shares of a width, which the template draws as inline SVG.

PHASES = (
    ("data_wait", "waiting for data"),
    ("forward", "forward"),
    ("backward_compute", "backward"),
    ("exposed_waiting", "waiting for the last rank"),
    ("exposed_transfer", "exposed transfer"),
    ("explicit", "explicit collectives"),
    ("optimizer", "optimizer"),
    ("other", "other"),
)
MOST_RANKS = 64


def phase_bars(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Return where the step of each rank goes; ranks without measured steps are left out, of many the latest stay."""
    measured = [rank for rank in snapshot.ranks if rank.phases is not None]
    if len(measured) > MOST_RANKS:
        latest = sorted(measured, key=lambda rank: -(rank.late_ns or 0.0))[:MOST_RANKS]
        measured = sorted(latest, key=lambda rank: rank.rank)
    longest = max((sum(_parts(rank).values()) for rank in measured), default=0.0)
    is_slow = snapshot.verdict.state != "broken"
    return [_bar(rank, longest, is_slow=is_slow) for rank in measured] if longest else []


def _parts(rank: RankView) -> dict[str, float]:
    return {} if rank.phases is None else {kind: ns or 0.0 for kind, ns in rank.phases.parts_ns().items()}


def _bar(rank: RankView, longest: float, *, is_slow: bool) -> dict[str, Any]:
    parts = _parts(rank)
    pieces: list[dict[str, Any]] = []
    start = 0.0
    for kind, label in PHASES:
        value = parts[kind]
        width = 100 * value / longest
        shown = in_milliseconds(value) if value else "—"
        pieces.append({"kind": kind, "label": label, "start": start, "width": width, "value": shown})
        start += width
    return {
        "label": f"rank {rank.rank}{f' on {one_line(rank.host)}' if rank.host else ''}",
        "total": in_milliseconds(sum(parts.values())),
        # Of a rank that broke the job its steps are no matter.
        "is_late": rank.culprit and is_slow,
        "pieces": pieces,
    }


def budget_row(figure: Figure) -> dict[str, Any]:
    """Return a figure of a gate, with two bars on a scale of its own."""
    before = figure.before or 0.0
    scale = max(before, figure.now) or 1.0
    return {
        "label": figure.label,
        "before": "—" if figure.before is None else amount(figure, before),
        "now": amount(figure, figure.now),
        "change": figure.change,
        "share": share(figure),
        "before_width": 100 * before / scale,
        "now_width": 100 * figure.now / scale,
        "lines": [
            f"{one_line(one.shown)}, {one_line(one.what)}: {amount(figure, one.before)} → {amount(figure, one.now)}"
            for one in figure.differences
        ],
    }


_ABOUT = ("Why it is bad", "When it is wrong", "References")
"""Sections of a check's documentation that a finding does not say itself."""
_NOTHING: Mapping[str, Any] = {
    **dict.fromkeys(("heading", "done", "doubt", "hint", "output", "against", "times"), ""),
    **dict.fromkeys(("why", "findings", "budget", "commands", "bars", "checks", "notes", "groups"), ()),
    "anchor": "run",
}
"""A section of the page before anything is in it."""
_PAGES = Path(__file__).with_name("page")
_QUOTED = regex("`([^`]+)`")


def render(examination: Examination, checks: Sequence[LoadedCheck] = ()) -> str:
    """Render an examination, or each part of one of several targets; ``checks`` are those that have findings."""
    parts = examination.parts or (examination,)
    return _filled(
        title=one_line(examination.target),
        verdict=headline(examination),
        tone={"clean": "good", "findings": "bad", "inconclusive": "doubt"}[examination.verdict],
        sections=[_section(part, number, several=len(parts) > 1) for number, part in enumerate(parts)],
        about={check.check.code: _about(check) for check in checks},
    )


def _about(check: LoadedCheck) -> dict[str, Any]:
    parts = explanation.sections(check.documentation)
    shown = [(heading, parts[heading], heading in explanation.VERBATIM) for heading in _ABOUT if heading in parts]
    return {"name": check.check.name, "summary": explanation.summary(check.documentation), "sections": shown}


def render_run(snapshot: Snapshot, root: str, checks: Sequence[LoadedCheck] = ()) -> str:
    """Render a watched run; paths are relative to ``root``; ``checks`` are those that have findings."""
    from ddpdoctor.report.run.run_text import what_was_seen

    verdict = snapshot.verdict
    standing = [view.finding for view in snapshot.findings if view.until_ns is None]
    over = [
        f"{view.finding.name} ({view.finding.code}): {view.finding.title}"
        for view in snapshot.findings
        if view.until_ns
    ]
    section = {
        **_NOTHING,
        "done": what_was_seen(snapshot),
        "hint": one_line(verdict.next),
        "why": [one_line(why) for why in verdict.why],
        "findings": _pages_of(standing, root),
        "bars": phase_bars(snapshot),
        "notes": [one_line(note) for note in (*over, *snapshot.notes)],
    }
    return _filled(
        title=one_line(snapshot.name),
        verdict=f"{verdict.state}: {one_line(verdict.text)}",
        tone={"healthy": "good", "slow": "doubt", "broken": "bad"}.get(verdict.state, "doubt"),
        sections=[section],
        about={check.check.code: _about(check) for check in checks},
    )


def render_page(page: Page) -> str:
    """Render what a command says of runs."""
    said = (page.name, page.answer)  # They stand above.
    shown = ([block for block in group if getattr(block, "text", "") not in said] for group in page.groups)
    groups = [[(type(block).__name__, block) for block in group] for group in shown if group]
    return _filled(
        title=one_line(page.name),
        verdict=one_line(page.answer),
        tone=page.tone or "plain",
        sections=[{**_NOTHING, "groups": groups}],
        about={},
    )


def _section(examination: Examination, number: int, *, several: bool) -> dict[str, Any]:
    from ddpdoctor.report.formats.full import what_was_done
    from ddpdoctor.report.gate_text import commands_of, notes_of, times_sentence

    rehearsal, gate = examination.rehearsal, examination.gate
    done = what_was_done(examination)
    notes = [*examination.source.notes, *rehearsal.notes, *examination.notes]
    return {
        **_NOTHING,
        "heading": one_line(examination.target) if several else "",
        "anchor": f"target-{number + 1}",
        "done": done,
        "doubt": one_line(why_incomplete(examination)) if leaves_doubt(examination) else "",
        "hint": one_line(rehearsal.hint) if leaves_doubt(examination) else "",
        "output": visible(rehearsal.output) if leaves_doubt(examination) else "",
        "findings": _pages_of(examination.findings, examination.root),
        "budget": list(map(budget_row, gate.figures)) if gate is not None else (),
        "against": one_line(gate.against) if gate is not None else "",
        "times": times_sentence(gate) if gate is not None else "",
        "commands": commands_of(gate) if gate is not None else (),
        "checks": _checks(examination),
        "notes": [one_line(note) for note in (*(notes_of(gate) if gate is not None else ()), *notes)],
    }


def _checks(examination: Examination) -> list[tuple[str, str, str]]:
    """Code and name, state and reason of every check that was to look."""
    states = {
        OutcomeState.FINDINGS: "findings",
        OutcomeState.PASSED: "passed",
        OutcomeState.NOTHING_TO_LOOK_AT: "nothing to look at",
        OutcomeState.NOT_EVALUATED: "not evaluated",
        OutcomeState.BOUND_HIT: "bound hit",
    }
    return [
        (f"{one_line(outcome.code)} {one_line(outcome.name)}", states[outcome.state], one_line(outcome.reason))
        for outcome in examination.outcomes
    ]


def _filled(**values: object) -> str:
    page = _template().render(
        style=(_PAGES / "page.css").read_text("utf-8"), phases=PHASES, version=__version__, **values
    )
    return page.rstrip("\n") + "\n"


@lru_cache(maxsize=1)
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup, escape

    def marked(text: str) -> Markup:
        """Show what stands between back quotes as code."""
        return Markup(_QUOTED.sub(r"<code>\1</code>", str(escape(text))))

    environment = Environment(
        loader=FileSystemLoader(_PAGES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["marked"] = marked
    environment.filters["one_line"] = one_line
    return environment.get_template("page.html.jinja")
