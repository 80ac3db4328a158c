"""Rehearsals after a clean one: on pretended nodes and with injected causes, and what they add to the diagnosis.

A second rehearsal is worth its time only when the first found nothing that a run can prove, and everything that it adds
is distinguished from defects that happen by themselves: what breaks under an injected cause is a warning that names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from ddpdoctor.catalogue.registry import CatalogueEntry, load
from ddpdoctor.catalogue.run_checks import CheckResult
from ddpdoctor.equivalence_section import EquivalenceSection
from ddpdoctor.examination import RehearsalSection
from ddpdoctor.finding import Fact, Finding, Severity, Trouble
from ddpdoctor.findings import DIVERGENCES
from ddpdoctor.launch.request import STRESSES, Layout, RehearsalRequest, Stress

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

SECOND_NODE = Layout(2, 1)
"""The smallest job in which a second node shows."""
_CAUSES = {
    "nan": "if one rank's loss is NaN",
    "short-batch": "if the last batch of a pass is short",
    "slow-rank0": "if rank 0 is slow between two steps",
}
_DONE = {
    "nan": "the output of rank 1's model was set to NaN in its third training forward",
    "short-batch": "training passes ended with the small last batch of their loader",
    "slow-rank0": "rank 0's clocks were advanced by the timeout of its group after the second step",
}
_BY_STRESS = DIVERGENCES | {"hang", "long-wait"}
"""What an injected cause may be blamed for: ranks that diverge, not numbers that are no numbers."""
_LEFT = frozenset({"early-exit", "exception"})


class Variant(msgspec.Struct, frozen=True):
    """One more rehearsal: another layout, or an injected cause."""

    layout: Layout | None = None
    stress: Stress = ""

    def __str__(self) -> str:
        return f"as {self.layout}" if self.layout is not None else f"under stress {self.stress}"


def variants(stress: Sequence[Stress], *, thorough: bool, spawns_ranks: bool, nodes: int) -> Iterator[Variant]:
    """Yield the rehearsals after a clean one; a script that starts its own ranks cannot be told of another node."""
    if thorough and nodes == 1 and not spawns_ranks:
        yield Variant(layout=SECOND_NODE)
    for kind in STRESSES:
        if thorough or kind in stress:
            yield Variant(stress=kind)


def is_clean(rehearsal: RehearsalSection, results: Sequence[CheckResult]) -> bool:
    """Return whether a rehearsal got to its end and proved nothing worse than advice, injected causes apart."""
    proved = [finding for result in results for finding in result.from_run if not finding.stress]
    return rehearsal.status == "completed" and not any(one.severity.at_least(Severity.WARNING) for one in proved)


STEPS_COMPARED = 2
SHARE_OF_LIMIT = 0.2
"""Of the time limit: a rehearsal that took more leaves no time to run the first steps of the script twice, and up to
three more times where they differ."""


def is_compared(
    rehearsed: RehearsalRequest,
    rehearsal: RehearsalSection,
    results: Sequence[CheckResult],
    *,
    asked: bool | None,
    thorough: bool,
) -> bool:
    """Return whether a rehearsal is to be compared with one process; ``asked`` as in ``ExamineRequest``."""
    from ddpdoctor.launch.rehearsal_plan import time_limit_s

    if asked is not None:
        # What ends a script behind its first steps, the time limit too, does not keep them from being compared; ranks
        # that part do.
        reached = rehearsal.steps >= STEPS_COMPARED and (rehearsal.status == "failed" or not rehearsal.told_by)
        return asked and (rehearsal.status == "completed" or reached)
    is_short = rehearsal.seconds <= SHARE_OF_LIMIT * time_limit_s(rehearsed, rehearsed.nproc)
    return is_clean(rehearsal, results) and (thorough or is_short)


def of_comparison(entries: Sequence[CatalogueEntry]) -> list[CatalogueEntry]:
    """Return the checks that look at the comparison with one process."""
    return [entry for entry in entries if "equivalence" in load(entry).check.needs]


def with_comparison(record: RunRecord, section: EquivalenceSection) -> RunRecord:
    """Return the record with the comparison; one that tells nothing is no evidence."""
    from ddpdoctor.record.model import StreamState

    state = StreamState("complete")
    if section.status == "inconclusive":
        state = StreamState("absent", f"whether one process would train the same is not known: {section.reason}")
    return msgspec.structs.replace(record, equivalence=(section,), streams={**record.streams, "equivalence": state})


def with_run_of(base: Sequence[CheckResult], more: Sequence[CheckResult]) -> tuple[CheckResult, ...]:
    """Return the results with those of checks that looked at a run again, beside what they say of the source."""
    again = {result.code: result for result in more}
    return tuple(_of_both(result, again[result.code]) if result.code in again else result for result in base)


def _of_both(base: CheckResult, run: CheckResult) -> CheckResult:
    of_source = "" if base.by_nature else base.gap
    return msgspec.structs.replace(
        run,
        from_source=base.from_source,
        gap=run.gap or of_source,
        unfollowed=base.unfollowed and not run.gap,
        bound_hit=base.bound_hit or run.bound_hit,
        crashed=base.crashed or run.crashed,
    )


def with_variant(base: Sequence[CheckResult], more: Sequence[CheckResult], variant: Variant) -> tuple[CheckResult, ...]:
    """Return the results with what one more rehearsal adds to them."""
    added = {result.code: tuple(_added(result.from_run, variant)) for result in more}
    extended = []
    for result in base:
        known = {(finding.location, finding.stress) for finding in result.from_run}
        new = tuple(one for one in added.get(result.code, ()) if (one.location, one.stress) not in known)
        extended.append(msgspec.structs.replace(result, from_run=(*result.from_run, *new)) if new else result)
    return tuple(extended)


def with_proof(base: Sequence[CheckResult], more: Sequence[CheckResult], trouble: Trouble) -> tuple[CheckResult, ...]:
    """Return the results with what an earlier rehearsal proved; that a later one leaves it out refutes nothing."""
    proved = {result.code: [one for one in result.from_run if one.trouble == trouble] for result in more}
    return tuple(
        msgspec.structs.replace(result, from_run=(*found, *result.from_run), refuted=())
        if (found := proved.get(result.code))
        else result
        for result in base
    )


def _added(findings: Sequence[Finding], variant: Variant) -> Iterator[Finding]:
    for finding in findings:
        if not variant.stress:
            yield finding
        elif finding.trouble in _BY_STRESS:
            # To stop on a loss that is no number is a decision, and an elastic launcher starts the job again.
            decided = variant.stress == "nan" and finding.trouble in _LEFT
            yield msgspec.structs.replace(
                finding,
                stress=variant.stress,
                severity=Severity.ADVICE if decided else Severity.WARNING,
                title=f"{_CAUSES[variant.stress]}: {finding.title}",
                evidence=(Fact(text=f"stress: {_DONE[variant.stress]}", basis="rehearsal"), *finding.evidence),
            )


def noted(
    rehearsal: RehearsalSection, variant: Variant, again: RehearsalSection, *, stressed: bool, found: bool
) -> RehearsalSection:
    """Return the section of the first rehearsal with what has to be said of one more.

    One that could not show what it was for makes the whole inconclusive. Ranks that all stop alike under an injected
    cause have shown it.
    """
    if variant.stress and not stressed and again.status == "completed":
        note = f"rehearsed again {variant}: it had nothing to act on"
        return msgspec.structs.replace(rehearsal, notes=(*rehearsal.notes, note))
    shown = again.status == "completed" or found or (bool(variant.stress) and again.status == "failed")
    if not shown:
        reason = f"rehearsed again {variant}: {again.reason}"
        return msgspec.structs.replace(
            rehearsal, status=again.status, reason=reason, hint=again.hint, output=again.output
        )
    how = "" if again.status == "completed" else f", ended by: {again.reason}"
    steps = f"{again.steps} step{'' if again.steps == 1 else 's'}"
    note = f"rehearsed again {variant}: {steps} in {again.seconds:.1f} s{how}"
    return msgspec.structs.replace(rehearsal, notes=(*rehearsal.notes, note))
