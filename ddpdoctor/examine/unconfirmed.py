"""Says what a rehearsal has to say about suspicions of the source that it did not confirm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from ddpdoctor.catalogue.run_checks import CheckResult
from ddpdoctor.diagnosis.wording import rank_list
from ddpdoctor.examination import RehearsalSection
from ddpdoctor.finding import Finding, Location, Severity
from ddpdoctor.findings.locations import same_file, shown_path
from ddpdoctor.findings.merge import SUSPECTED

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord


class Reached(msgspec.Struct, frozen=True):
    """The lines that ranks ran, by file."""

    lines: Mapping[str, frozenset[int]] = {}
    """Those that some rank ran."""
    alone: Mapping[str, Mapping[int, tuple[int, ...]]] = {}
    """Those of them that not all ranks ran, with the ranks that did; only where that is certain."""
    is_whole: bool = True
    """They are known from the script's beginning, and not from that of training."""


def reached_lines(record: RunRecord | None) -> Reached | None:
    """Return the lines that the ranks of a run ran; None when that is not known."""
    if record is None or record.stream("lines").state != "complete":
        return None
    ranks = {one.rank for one in record.lines}
    lines: dict[str, frozenset[int]] = {}
    alone: dict[str, dict[int, tuple[int, ...]]] = {}
    for file in {one.file: None for one in record.lines}:
        of_file = [one for one in record.lines if one.file == file]
        lines[file] = frozenset().union(*(one.lines for one in of_file))
        if not any(one.unwatched for one in of_file):
            by_chance = frozenset().union(*(one.by_chance for one in of_file))
            ran = {line: tuple(one.rank for one in of_file if line in one.lines) for line in lines[file] - by_chance}
            alone[file] = {line: those for line, those in ran.items() if len(those) < len(ranks)}
    return Reached(lines, alone, is_whole=not any(one.late for one in record.lines))


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
    place, seen = finding.location, reached
    if reached is not None and not reached.is_whole:
        reached = None
    if place is not None and _was_missed(place, rehearsal, reached):
        return f"not rehearsed: no rank reached {shown_path(place.file, root)}:{place.line}"
    if nodes_wanted and (rehearsal.status == "completed" or reached is not None):
        return f"not confirmed: it cannot occur on one node; use `--layout {nodes_wanted}x1`"
    if rehearsal.status == "completed":
        shortened = ", on the first batches of each pass" if rehearsal.passes_cut else ""
        apart = _where_ranks_parted(finding, seen) if finding.trouble in SUSPECTED else None
        if apart is not None:
            where, ranks = apart
            line = f"{shown_path(where.file, root)}:{where.line}{'' if reached is not None else ' in training'}"
            told = f"only {rank_list(ranks)} ran {line}, and nothing came of it in the rehearsal"
            return f"not confirmed: {told}{shortened}"
        return f"not confirmed: it did not occur in the rehearsal{shortened}"
    if reached is None and not rehearsal.steps:
        return "not rehearsed: no training step was made"
    return "not confirmed: the rehearsal ended before it could occur"


def _where_ranks_parted(finding: Finding, reached: Reached | None) -> tuple[Location, tuple[int, ...]] | None:
    """Return the first place of a suspicion that some ranks ran and others did not, with those that did."""
    for place in finding.locations:
        for file, alone in reached.alone.items() if reached is not None else ():
            if place.line in alone and same_file(file, place.file):
                return place, alone[place.line]
    return None


def _was_missed(place: Location, rehearsal: RehearsalSection, reached: Reached | None) -> bool:
    """Return whether no rank reached a place; without all lines only code that is known to be unreached counts."""
    if reached is not None:
        return not _was_reached(place, reached)
    return any(
        same_file(one.file, place.file) and one.first_line <= place.line <= one.last_line for one in rehearsal.unreached
    )


def _was_reached(place: Location, reached: Reached) -> bool:
    lines = range(place.line, max(place.line, place.end_line) + 1)
    return any(ran.intersection(lines) for file, ran in reached.lines.items() if same_file(file, place.file))
