"""The findings as a Markdown table, for job summaries and comments on pull requests."""

from __future__ import annotations

from ddpdoctor.examination import Examination
from ddpdoctor.files import regex
from ddpdoctor.finding import Finding, rank_list, shown_path
from ddpdoctor.gate.budget import percent
from ddpdoctor.report.finding_fields import headline, stated
from ddpdoctor.report.formats.concise import leaves_doubt, why_incomplete
from ddpdoctor.report.formats.html import budget_row
from ddpdoctor.report.gate_text import commands_of, notes_of, times_sentence
from ddpdoctor.report.streams import one_line, without_commands

_SPECIAL = regex(r"([\\`*_{}\[\]<>#|~!$@&])")
_CODE = regex(r"(?<!`)`([^`|]+)`(?!`)")
"""A span; not one with a bar, which ends a cell of a table even there."""


def render(examination: Examination) -> str:
    """Render a heading, one row a finding, what else has to be known, and of a gate its budget and commands."""
    lines = [f"## ddpdoctor: {headline(examination)}", ""]
    if examination.findings:
        lines += ["| severity | check | where | what | what to do |", "| --- | --- | --- | --- | --- |"]
        lines += [_row(finding, examination) for finding in examination.findings]
        codes = dict.fromkeys(finding.code for finding in examination.findings)
        lines += ["", f"More on a check: {', '.join(f'`ddpdoctor explain {code}`' for code in codes)}."]
    elif not leaves_doubt(examination):
        lines.append(f"No finding in {_text(examination.target)}.")
    if leaves_doubt(examination):
        lines += ["", f"Not everything could be examined: {_text(why_incomplete(examination))}."]
    for part in examination.parts or (examination,):
        lines += _gate(part)
    notes = (*examination.source.notes, *examination.rehearsal.all_notes, *examination.notes)
    lines += ["", *(f"- {_text(note)}" for note in notes)] if notes else []
    return without_commands("\n".join(lines).rstrip("\n") + "\n")


def _gate(examination: Examination) -> list[str]:
    """Return the budget of a gate as a table, and the commands to go on with."""
    if examination.gate is None:
        return []
    rows = list(map(budget_row, examination.gate.figures))
    lines = ["", f"### {_text(examination.target)}"]
    if rows:
        allowed = examination.gate.allowed_growth
        limit = f"the limit is {percent(allowed)} more" if allowed else "no figure may grow"
        lines += ["", f"Budget against {_text(examination.gate.against)}; {limit}:", ""]
        lines += ["| figure | before | now | change | lines |", "| --- | --- | --- | --- | --- |"]
        for row in rows:
            change = " ".join(filter(None, (row["change"], row["share"])))
            cells = (row["label"], row["before"], row["now"], f"**{change}**" if row["change"] == "grown" else change)
            lines.append(f"| {' | '.join(cells)} | {'<br>'.join(map(_text, row['lines']))} |")
    sentences = [*filter(None, [times_sentence(examination.gate)]), *notes_of(examination.gate)]
    lines += ["", *(f"- {_text(sentence)}" for sentence in sentences)] if sentences else []
    commands = commands_of(examination.gate)
    return lines + (["", *(f"- {what}: {_text(f'`{command}`')}" for what, command in commands)] if commands else [])


def _row(finding: Finding, examination: Examination) -> str:
    place = finding.location
    where = "" if place is None else f"{_text(shown_path(place.file, examination.root))}:{place.line}"
    if finding.ranks:
        where += f"{', ' if where else ''}{rank_list(finding.ranks)}"
    cells = (
        finding.severity.value,
        f"{_text(finding.name)} ({_text(finding.code)})",
        where,
        _text(stated(finding)),
        _text(finding.remedy),
    )
    return f"| {' | '.join(cells)} |"


def _text(text: str) -> str:
    """Text that Markdown shows as it is, on one line; what stands between backticks is code."""
    pieces = _CODE.split(one_line(text))
    return "".join(f"`{piece}`" if number % 2 else _SPECIAL.sub(r"\\\1", piece) for number, piece in enumerate(pieces))
