"""Annotations of GitHub Actions: workflow commands that put a finding beside its line in the pull request.

A step shows the first 10 of each kind, so the worst come first.

https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
"""

from __future__ import annotations

from ddpdoctor.examination import Examination
from ddpdoctor.finding import Finding, Severity, shown_path
from ddpdoctor.report.finding_fields import region_of, stated
from ddpdoctor.report.formats.concise import leaves_doubt, why_incomplete
from ddpdoctor.report.streams import one_line

_KINDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.ADVICE: "notice"}


def render(examination: Examination) -> str:
    """Render one command a finding, and one that says why when not everything could be examined."""
    commands = [
        _command(finding, examination)
        for severity in Severity
        for finding in examination.findings
        if finding.severity is severity
    ]
    if leaves_doubt(examination):
        message = one_line(f"{examination.target}: {why_incomplete(examination)}")
        commands.append(f"::warning title={_property('ddpdoctor (inconclusive)')}::{_data(message)}")
    return "".join(command + "\n" for command in commands)


def _command(finding: Finding, examination: Examination) -> str:
    properties = {"title": f"ddpdoctor ({finding.code})"}
    place = finding.location
    if place is not None:
        region = region_of(place)
        properties |= {"file": shown_path(place.file, examination.root), "line": str(region.line)}
        # Columns mean something only within one line.
        if region.end_line == region.line:
            properties["col"] = str(region.column)
        properties["endLine"] = str(region.end_line)
        if region.end_line == region.line:
            properties["endColumn"] = str(region.end_column)
    written = ",".join(f"{name}={_property(one_line(value))}" for name, value in properties.items())
    message = f"{finding.name}: {stated(finding)}\n{one_line(finding.remedy)}"
    return f"::{_KINDS[finding.severity]} {written}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
