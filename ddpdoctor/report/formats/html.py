"""The report as one page of HTML: nothing is loaded from outside, no script runs, and it prints.

All text is escaped by the template library; the page's own policy forbids scripts and requests besides.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor import __version__
from ddpdoctor.check import OutcomeState
from ddpdoctor.examination import Examination
from ddpdoctor.report.escape import one_line, visible
from ddpdoctor.report.formats.concise import leaves_doubt, why_incomplete
from ddpdoctor.report.formats.page.charts import PHASES, budget_rows, phase_bars
from ddpdoctor.report.formats.page.findings import pages_of

if TYPE_CHECKING:
    from jinja2 import Template

    from ddpdoctor.monitor.snapshot import Snapshot

_PAGES = Path(__file__).with_name("page")
_WORDS = {"clean": "nothing found", "findings": "findings", "inconclusive": "inconclusive"}


def render(examination: Examination) -> str:
    """Render an examination, or each part of one of several targets."""
    parts = examination.parts or (examination,)
    return _filled(
        title=one_line(examination.target),
        verdict=_WORDS[examination.verdict],
        tone={"clean": "good", "findings": "bad", "inconclusive": "doubt"}[examination.verdict],
        sections=[_section(part, number, several=len(parts) > 1) for number, part in enumerate(parts)],
    )


def render_run(snapshot: Snapshot, root: str) -> str:
    """Render a watched run; paths are relative to ``root``."""
    from ddpdoctor.report.run.run_text import what_was_seen

    verdict = snapshot.verdict
    standing = [view.finding for view in snapshot.findings if view.until_ns is None]
    over = [
        f"{view.finding.name} ({view.finding.code}): {view.finding.title}"
        for view in snapshot.findings
        if view.until_ns
    ]
    section = {
        "heading": "",
        "anchor": "run",
        "done": what_was_seen(snapshot),
        "doubt": "",
        "hint": one_line(verdict.next),
        "output": "",
        "why": [one_line(why) for why in verdict.why],
        "findings": pages_of(standing, root),
        "budget": (),
        "against": "",
        "times": "",
        "bars": phase_bars(snapshot),
        "checks": (),
        "notes": [one_line(note) for note in (*over, *snapshot.notes)],
    }
    return _filled(
        title=one_line(snapshot.name),
        verdict=f"{verdict.state}: {one_line(verdict.text)}",
        tone={"healthy": "good", "slow": "doubt", "broken": "bad"}.get(verdict.state, "doubt"),
        sections=[section],
    )


def _section(examination: Examination, number: int, *, several: bool) -> dict[str, Any]:
    from ddpdoctor.report.formats.full import what_was_done
    from ddpdoctor.report.gate_text import notes_of, times_sentence

    rehearsal, gate = examination.rehearsal, examination.gate
    done = what_was_done(examination)
    notes = [*examination.source.notes, *rehearsal.notes, *examination.notes]
    return {
        "heading": one_line(examination.target) if several else "",
        "anchor": f"target-{number + 1}",
        "done": done,
        "doubt": one_line(why_incomplete(examination)) if leaves_doubt(examination) else "",
        "hint": one_line(rehearsal.hint) if leaves_doubt(examination) else "",
        "output": visible(rehearsal.output) if leaves_doubt(examination) else "",
        "why": [],
        "findings": pages_of(examination.findings, examination.root),
        "budget": budget_rows(gate) if gate is not None else (),
        "against": one_line(gate.against) if gate is not None else "",
        "times": times_sentence(gate) if gate is not None else "",
        "bars": (),
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

    environment = Environment(
        loader=FileSystemLoader(_PAGES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja")
