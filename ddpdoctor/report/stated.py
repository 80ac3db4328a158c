"""A finding in one sentence, for the formats that have a line for it."""

from __future__ import annotations

from ddpdoctor.finding import Finding
from ddpdoctor.report.escape import one_line


def stated(finding: Finding) -> str:
    """Return the title, and in brackets whether a rehearsal has yet to confirm it."""
    doubt = doubt_of(finding)
    return one_line(f"{finding.title} ({doubt})" if doubt else finding.title)


def doubt_of(finding: Finding) -> str:
    """``not rehearsed``, ``not confirmed``, ``not certain``, ``echo``; empty where there is no such doubt."""
    if finding.role == "echo":
        return "echo"
    return one_line(finding.unconfirmed.partition(":")[0]) or ("not certain" if finding.doubt else "")
