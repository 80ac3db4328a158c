"""The findings as a Markdown table, for job summaries and comments on pull requests."""

from __future__ import annotations

import re

from ddpdoctor.examination import Examination
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.findings.locations import named_ranks, shown_path
from ddpdoctor.report.escape import one_line, without_commands
from ddpdoctor.report.finding_fields import stated
from ddpdoctor.report.formats.concise import leaves_doubt, why_incomplete

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!$@&])")
_HEADS = {"clean": "nothing found", "findings": "findings", "inconclusive": "inconclusive"}


def render(examination: Examination) -> str:
    """Render a heading, one row a finding, and what else has to be known."""
    lines = [f"## ddpdoctor: {_HEADS[examination.verdict]}", ""]
    if examination.findings:
        lines += ["| severity | check | where | what | what to do |", "| --- | --- | --- | --- | --- |"]
        lines += [_row(finding, examination) for finding in examination.findings]
    elif not leaves_doubt(examination):
        lines.append(f"No finding in {_text(examination.target)}.")
    if examination.findings:
        lines += ["", _counted(examination)]
    if leaves_doubt(examination):
        lines += ["", f"Not everything could be examined: {_text(why_incomplete(examination))}."]
    notes = (*examination.source.notes, *examination.rehearsal.all_notes, *examination.notes)
    lines += ["", *(f"- {_text(note)}" for note in notes)] if notes else []
    return without_commands("\n".join(lines).rstrip("\n") + "\n")


def _row(finding: Finding, examination: Examination) -> str:
    place = finding.location
    where = "" if place is None else f"{_text(shown_path(place.file, examination.root))}:{place.line}"
    if finding.ranks:
        where += f"{', ' if where else ''}{named_ranks(finding.ranks)}"
    cells = (
        finding.severity.value,
        f"{_text(finding.name)} ({_text(finding.code)})",
        where,
        _text(stated(finding)),
        _text(finding.remedy),
    )
    return f"| {' | '.join(cells)} |"


def _counted(examination: Examination) -> str:
    severities = [finding.severity for finding in examination.findings]
    counts = [f"{severities.count(severity)} {severity.value}" for severity in Severity if severity in severities]
    return f"{', '.join(counts)} in {_text(examination.target)}."


def _text(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", one_line(text))
