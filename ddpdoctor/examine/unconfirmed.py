"""Says what a rehearsal has to say about suspicions of the source that it did not confirm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from ddpdoctor.catalogue.run_checks import CheckResult
from ddpdoctor.examination import RehearsalSection
from ddpdoctor.finding import Finding, Location, Severity
from ddpdoctor.findings.locations import same_file, shown_path
from ddpdoctor.findings.merge import SUSPECTED

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

Reached = Mapping[str, frozenset[int]]
"""By file the lines that some rank ran."""


def reached_lines(record: RunRecord | None) -> Reached | None:
    """Return the lines that the ranks of a run ran; None when that is not known, or not from the script's beginning."""
    if record is None or record.stream("lines").state != "complete" or any(one.late for one in record.lines):
        return None
    reached: dict[str, frozenset[int]] = {}
    for executed in record.lines:
        reached[executed.file] = reached.get(executed.file, frozenset()) | executed.lines
    return reached


def with_confirmation(
    findings: Iterable[Finding],
    results: Iterable[CheckResult],
    rehearsal: RehearsalSection,
    reached: Reached | None,
    root: str,
) -> tuple[Finding, ...]:
    """Mark the suspicions that a rehearsal could have confirmed and did not.

    Only checks that looked at the run can have confirmed one, and checks of divergences, which the run may call by
    another name. Advice of a check that otherwise warns is of habits that a run does not show, unless it says so.
    """
    if rehearsal.status == "skipped":
        return tuple(findings)
    looked = {result.code for result in results if result.looked_at_run}
    usual = {result.code: result.source_severity for result in results if result.source_severity is not None}
    nodes_wanted = {result.code: result.nodes_wanted for result in results if result.nodes_wanted}

    def confirmed(finding: Finding) -> Finding:
        by_a_run = finding.code in looked or (bool(looked) and finding.trouble in SUSPECTED)
        if finding.basis != {"source"} or not by_a_run:
            return finding
        if finding.severity is Severity.ADVICE is not usual.get(finding.code, Severity.ADVICE):
            return finding
        sentence = _sentence(finding, rehearsal, reached, root, nodes_wanted.get(finding.code, 0))
        return msgspec.structs.replace(finding, unconfirmed=sentence)

    return tuple(map(confirmed, findings))


def _sentence(
    finding: Finding, rehearsal: RehearsalSection, reached: Reached | None, root: str, nodes_wanted: int
) -> str:
    place = finding.location
    if place is not None and _was_missed(place, rehearsal, reached):
        return f"not rehearsed: no rank reached {shown_path(place.file, root)}:{place.line}"
    if nodes_wanted and (rehearsal.status == "completed" or reached is not None):
        return f"not confirmed: it cannot occur on one node; use `--layout {nodes_wanted}x1`"
    if rehearsal.status == "completed":
        shortened = ", on the first batches of each pass" if rehearsal.passes_cut else ""
        return f"not confirmed: it did not occur in the rehearsal{shortened}"
    if reached is None and not rehearsal.steps:
        return "not rehearsed: no training step was made"
    return "not confirmed: the rehearsal ended before it could occur"


def _was_missed(place: Location, rehearsal: RehearsalSection, reached: Reached | None) -> bool:
    """Return whether no rank reached a place; without all lines only code that is known to be unreached counts."""
    if reached is not None:
        return not _was_reached(place, reached)
    return any(
        same_file(one.file, place.file) and one.first_line <= place.line <= one.last_line for one in rehearsal.unreached
    )


def _was_reached(place: Location, reached: Reached) -> bool:
    lines = range(place.line, max(place.line, place.end_line) + 1)
    return any(ran.intersection(lines) for file, ran in reached.items() if same_file(file, place.file))
