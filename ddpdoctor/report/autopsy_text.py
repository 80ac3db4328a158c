"""An autopsy as text for people: what was read, the first cause, its echoes in a line each, and what is missing."""

from __future__ import annotations

from rich.text import Text

from ddpdoctor.examination import AutopsySection, Examination
from ddpdoctor.finding import WENT_ON, Finding, count, shown_path
from ddpdoctor.report.finding_text import explanation_lines, finding_lines, label
from ddpdoctor.report.layout import note_lines, paragraph, to_string
from ddpdoctor.report.streams import one_line

ECHOES = 6
"""How many echoes of a kind are shown; all are in the JSON."""


def render(examination: Examination, section: AutopsySection, width: int, *, colour: bool) -> str:
    """Render the autopsy for ``width`` columns."""
    lines = paragraph(Text(what_was_read(section)), width, indent=0)
    causes = [finding for finding in examination.findings if finding.role != "echo"]
    echoes = [finding for finding in examination.findings if finding.role == "echo"]
    survived = [finding for finding in echoes if finding.title.endswith(WENT_ON)]
    for finding in causes:
        lines += [Text(), *finding_lines(finding, examination.root, width)]
        if finding.doubt:
            lines += label("not certain:", Text(one_line(finding.doubt)), width)
    if causes:
        lines += [Text(), *explanation_lines(causes, width)]
    followed = [finding for finding in echoes if finding not in survived]
    for heading, told in (("what followed", followed), ("what the job went on after", survived)):
        lines += [Text(), Text(heading, "bold")] if told else []
        for finding in told[:ECHOES]:
            lines += paragraph(Text(_echo(finding, examination.root)), width, Text("  -"), indent=4)
        if len(told) > ECHOES:
            lines.append(Text(f"  - and {len(told) - ECHOES} more, listed in the JSON"))
    if section.missing:
        lines += [Text(), Text("missing evidence; to have it next time", "bold")]
        for sentence in section.missing:
            lines += paragraph(Text(one_line(sentence)), width, Text("  -"), indent=4)
    if examination.notes:
        lines += [Text(), *note_lines(examination.notes, width)]
    lines += [Text(), *paragraph(_summary(causes, section, survived=bool(survived) and not followed), width, indent=0)]
    return to_string(lines, colour=colour)


def what_was_read(section: AutopsySection) -> str:
    """Say in one line what was read and how long it took."""
    parts = []
    if section.logs:
        parts.append(f"{count(section.logs, 'log')} ({count(section.lines, 'line')})")
    if section.dumps:
        parts.append(count(section.dumps, "flight-recorder dump"))
    if section.error_files:
        parts.append(count(section.error_files, "error file"))
    if section.runs:
        parts.append(count(section.runs, "recorded run"))
    if section.processes:
        parts.append(f"the stacks of {count(section.processes, 'process', 'processes')}")
    read = " and ".join(parts) or "nothing"
    ranks = f": {count(len(section.ranks), 'rank')}" if section.ranks else ""
    attempts = f", started {section.attempts} times" if section.attempts > 1 else ""
    return f"Read {read} in {section.seconds:.2f} s{ranks}{attempts}."


def _summary(causes: list[Finding], section: AutopsySection, *, survived: bool) -> Text:
    first = next((finding for finding in causes if finding.role == "cause"), None)
    if first is None:
        told = "nothing in the input shows how the job died"
        if survived:
            told = "the job went on after all that its logs report, and they do not show that it died"
        if section.processes:
            told = "no rank was waiting for another"
        return Text(f"Inconclusive: {told}.", "bold yellow")
    certain = "First cause" if section.certain else "Probable first cause"
    return Text(f"{certain}: {one_line(first.title)}.", "bold red" if section.certain else "bold yellow")


def _echo(finding: Finding, root: str) -> str:
    place = f" ({shown_path(finding.location.file, root)}:{finding.location.line})" if finding.location else ""
    known = finding.location is not None and f":{finding.location.line}" in finding.title
    return one_line(finding.title.removesuffix(WENT_ON) + ("" if known else place))
