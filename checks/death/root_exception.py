"""One rank's exception brought the job down.

What it finds
    The first exception in time among the ranks that is not an echo of another rank's end "Connection closed by peer",
    where the other ranks continued or failed because of it; of a live or dead job also one that all its ranks raised.

Why it is bad
    The launcher and the other ranks report their lost connections, often louder and under another rank's name; the
    cause is one traceback among many.

Example
    batch = collate(samples)            # KeyError on the one rank whose shard holds a bad sample

Remedy
    Fix the exception on that rank; the errors of the other ranks follow from it.

When it is wrong
    Where the ranks' clocks differ by more than the time between two exceptions.

References
    https://docs.pytorch.org/docs/stable/elastic/errors.html
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, RunRecord, Via
from ddpdoctor.checks.death.failures_run import common_exception
from ddpdoctor.diagnosis.divergence_kind import divergence_finding, divergence_of
from ddpdoctor.diagnosis.wording import location_of, place, rank_list
from ddpdoctor.finding import Finding, Refuted, Severity

CHECK = Check(
    code="DDP706",
    name="root-exception",
    stands_for="exception",
    severity=dict.fromkeys(("rehearsal", "run", "log"), Severity.ERROR),
    needs=frozenset({"ranks"}),
)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the exception of the rank that left first; of a job itself also the one that all ranks raised."""
    divergence = divergence_of(record, CHECK.stands_for)
    if divergence is not None:
        yield divergence_finding(
            CHECK,
            record,
            divergence,
            f"Fix the exception on rank {divergence.culprit}; the errors of the other ranks follow from it.",
        )
        return
    common = common_exception(record)
    if common is not None:
        ranks, raised, message = common
        frame = raised.frames[0] if raised.frames else None
        location = location_of(frame)
        yield CHECK.finding(
            f"{rank_list(ranks)} raised {raised.type} at {place(frame)}: {message}",
            basis=record.job.kind,
            remedy="Fix this exception: it ended the job.",
            locations=location,
            ranks=ranks,
            because=(f"{raised.type}: {message}", Via(location, raised.frames)),
        )
