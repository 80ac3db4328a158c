"""The findings of a check about what the logs of a dead job tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from msgspec.structs import replace

from ddpdoctor.check import Check
from ddpdoctor.diagnosis import log_wording
from ddpdoctor.diagnosis.accusations import accuse
from ddpdoctor.diagnosis.classify import divergence_with_code
from ddpdoctor.diagnosis.divergence import Divergence, find_divergence
from ddpdoctor.diagnosis.log_causes import Told, causes_of
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.record.model import RunRecord


def from_log(check: Check, record: RunRecord, remedy: str | Callable[[Told], str]) -> Iterator[Finding]:
    """The first cause, where this check speaks for it, and the echoes that it speaks for; echoes are advice."""
    for told in causes_of(record):
        if told.code == check.code:
            is_cause = told.role == "cause" and not explains_the_death(record)
            named = told.absent if told.first.kind in ("timed-out", "lost-peer") and is_cause else told.ranks
            yield check.finding(
                "log",
                log_wording.title(told),
                remedy=(remedy if isinstance(remedy, str) else remedy(told))
                if is_cause
                else "It came after the first cause: mend that one first.",
                locations=log_wording.locations(told),
                ranks=named,
                evidence=tuple(log_wording.facts(told)),
                severity=None if is_cause else Severity.ADVICE,
                role="cause" if is_cause else "echo",
                doubt=told.doubt,
            )


def from_dumps(
    check: Check, record: RunRecord, remedy: Callable[[Divergence], str], severity: Severity | None = None
) -> Iterator[Finding]:
    """Where the ranks' collectives part by the flight recorder's dumps, if this check speaks for it."""
    divergence = divergence_with_code(record, check.code) if record.collectives else None
    if divergence is not None:
        role: Literal["cause", "echo"] = "cause" if explains_the_death(record) else "echo"
        yield replace(accuse(check, record, divergence, remedy(divergence), severity), role=role)


def explains_the_death(record: RunRecord) -> bool:
    """Tell whether dumps show where ranks part, and no log tells of a failure that comes before that."""
    if not record.collectives or find_divergence(record) is None:
        return False
    causes = causes_of(record)
    return not causes or causes[0].first.kind in ("timed-out", "lost-peer")
