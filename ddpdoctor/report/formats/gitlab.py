"""A Code Quality report of GitLab: a list of objects, one a finding.

https://docs.gitlab.com/ci/testing/code_quality/#code-quality-report-format
"""

from __future__ import annotations

from ddpdoctor.examination import Examination
from ddpdoctor.finding import Finding, Severity, shown_path
from ddpdoctor.report.finding_fields import region_of, stated
from ddpdoctor.report.formats.concise import leaves_doubt, why_incomplete
from ddpdoctor.report.formats.json import indented
from ddpdoctor.report.streams import one_line

_SEVERITIES = {Severity.ERROR: "critical", Severity.WARNING: "major", Severity.ADVICE: "info"}


def render(examination: Examination) -> str:
    """Render the report; an examination that is not complete adds an entry that says why."""
    entries = [_entry(finding, examination) for finding in examination.findings]
    if leaves_doubt(examination):
        from hashlib import sha256

        target = f"inconclusive\0{examination.target}".encode("utf-8", "surrogatepass")
        entries.append(
            {
                "description": one_line(f"inconclusive: {why_incomplete(examination)}"),
                "check_name": "inconclusive",
                "engine_name": "ddpdoctor",
                "fingerprint": sha256(target).hexdigest()[:16],
                "severity": "info",
                "location": {"path": one_line(examination.target), "lines": {"begin": 1, "end": 1}},
            }
        )
    return indented(entries)


def _entry(finding: Finding, examination: Examination) -> dict[str, object]:
    place = finding.location
    region = None if place is None else region_of(place)
    path = examination.target if place is None else shown_path(place.file, examination.root)
    lines = {"begin": 1, "end": 1} if region is None else {"begin": region.line, "end": region.end_line}
    return {
        "description": f"{stated(finding)}. {one_line(finding.remedy)}",
        "check_name": f"{finding.code} {finding.name}",
        "engine_name": "ddpdoctor",
        "fingerprint": finding.fingerprint,
        "severity": _SEVERITIES[finding.severity],
        "location": {"path": one_line(path), "lines": lines},
    }
