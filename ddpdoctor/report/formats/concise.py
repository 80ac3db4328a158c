"""One line a finding, for editors, grep and logs: ``path:line:col: severity CODE name: title``."""

from __future__ import annotations

from ddpdoctor.examination import Examination
from ddpdoctor.finding import Finding, shown_path
from ddpdoctor.report.finding_fields import stated
from ddpdoctor.report.streams import one_line, without_commands


def render(examination: Examination) -> str:
    """Render the findings, and a line that says why when the examination is inconclusive."""
    lines = [_line(finding, examination) for finding in examination.findings]
    if leaves_doubt(examination):
        lines.append(f"{one_line(examination.target)}: inconclusive: {one_line(why_incomplete(examination))}")
    return "".join(without_commands(line) + "\n" for line in lines)


def leaves_doubt(examination: Examination) -> bool:
    """Return whether the line has to show that not everything was examined: no finding says why."""
    says_why = any(finding.basis - {"source"} for finding in examination.findings)
    return examination.verdict == "inconclusive" or not (examination.complete or says_why)


def why_incomplete(examination: Examination) -> str:
    """Say in one sentence why not everything that was asked for was examined."""
    if examination.autopsy is not None:
        return "; ".join(examination.notes) or "nothing in the input shows a failure"
    rehearsal = examination.rehearsal
    if examination.gate is not None and examination.gate.doubt:
        return examination.gate.doubt
    if rehearsal.status in ("stopped", "failed"):
        reason = f": {rehearsal.reason}" if rehearsal.reason else ""
        return f"the rehearsal {'was stopped' if rehearsal.status == 'stopped' else 'failed'}{reason}"
    if examination.source.status == "failed":
        return "; ".join(examination.source.notes)
    if not examination.recognised:
        return f"no distributed training was recognised in {examination.target}"
    gaps = (one for one in examination.outcomes if one.reason and not one.unstated and not one.by_nature)
    gap = next(gaps, None)
    return f"{gap.name} was not evaluated: {gap.reason}" if gap else "not everything could be examined"


def _line(finding: Finding, examination: Examination) -> str:
    place = finding.location
    if place is None:
        where = f"{one_line(examination.target)}:1:1"
    else:
        where = f"{one_line(shown_path(place.file, examination.root))}:{place.line}:{place.column}"
    return f"{where}: {finding.severity.value} {finding.code} {finding.name}: {stated(finding)}"
