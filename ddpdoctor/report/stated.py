"""A finding in one sentence, for the formats that have a line for it."""

from __future__ import annotations

from ddpdoctor.finding import Finding
from ddpdoctor.report.escape import one_line


def stated(finding: Finding) -> str:
    """The title, and in brackets whether a rehearsal has yet to confirm it."""
    doubt = finding.unconfirmed.partition(":")[0]
    return one_line(f"{finding.title} ({doubt})" if doubt else finding.title)
