"""Puts what the diagnosis knows of a divergence, a path or a load into the findings of the check that reports it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ddpdoctor.check import Check
from ddpdoctor.diagnosis.divergence import describe
from ddpdoctor.diagnosis.divergence.divergence import Divergence
from ddpdoctor.diagnosis.files.checkpoints import LoadVerdict
from ddpdoctor.diagnosis.files.path_verdicts import judge_paths
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.record.model import RunRecord


def divergence_finding(
    check: Check, record: RunRecord, divergence: Divergence, remedy: str, severity: Severity | None = None
) -> Finding:
    """Return the finding of a check about the divergence of a run; its severity is the check's unless another is
    given.
    """
    return check.finding(
        record.job.kind,
        describe.title(divergence),
        remedy=remedy,
        locations=describe.locations(divergence),
        ranks=describe.ranks(divergence),
        evidence=describe.facts(divergence, record.job.kind),
        severity=severity,
    )


def path_findings(check: Check, record: RunRecord, remedy: str) -> Iterator[Finding | Refuted]:
    """Yield the findings of a check about paths at which ranks meet, and the places where it is refuted that they
    do.
    """
    for verdict in judge_paths(record, check.stands_for):
        if not verdict.races:
            yield Refuted(location=verdict.locations[0], reason=verdict.sentence)
            continue
        yield check.finding(
            record.job.kind,
            verdict.sentence,
            remedy=remedy,
            locations=verdict.locations,
            ranks=verdict.ranks,
            evidence=tuple(
                Fact(text=text, basis=record.job.kind, rank=rank, location=place) for rank, text, place in verdict.facts
            ),
            severity=verdict.severity,
        )


def load_findings(
    check: Check, record: RunRecord, verdicts: Iterable[LoadVerdict], remedy: str
) -> Iterator[Finding | Refuted]:
    """Yield the findings of a check about loads that went wrong, and the places of those that did not."""
    for verdict in verdicts:
        if not verdict.wrong:
            yield Refuted(location=verdict.location, reason=verdict.sentence)
            continue
        yield check.finding(
            record.job.kind,
            verdict.sentence,
            remedy=remedy,
            locations=(verdict.location,),
            ranks=verdict.ranks,
            evidence=(Fact(text=verdict.fact, basis=record.job.kind, location=verdict.location),),
        )
