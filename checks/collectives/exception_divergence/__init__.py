"""A rank catches a failure and continues without its peers.

What it finds
    A handler of failures that can hit one rank alone (out of memory, a corrupt sample, a bare except, an exception of
    the project's own that is raised for what a rank's batch holds) around a collective or a backward of the DDP model,
    or in a loop with one, that does not end the rank: it continues to later collectives, or leaves a loop in which the
    others continue.

Why it is bad
    The failed rank skipped collectives in which the others still wait. From there on it is one behind: the job
    hangs, or pairs its next gradients with those of another step. The log shows a harmless "skipping batch".

Example
    try:
        loss = model(batch).mean()
        loss.backward()
    except RuntimeError:                # out of memory on this rank only
        optimizer.zero_grad()
        continue

Remedy
    Let the exception end the rank, so that the launcher ends the job; or all-reduce whether all ranks succeeded, before
    the first collective of the step, and skip the step together.

When it is wrong
    Where the caught failure happens on every rank at the same place.

References
    https://docs.pytorch.org/docs/stable/notes/ddp.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.checks.collectives.exception_divergence.source import Swallowed, swallowed
from ddpdoctor.finding import Fact, Finding, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP311",
    name="exception-divergence",
    stands_for="caught-exception",
    severity={"source": Severity.WARNING, "rehearsal": Severity.ERROR},
    needs=frozenset({"ranks", "collectives", "handled"}),
    subjects=("collectives",),
    triggers=("except",),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report handlers that swallow a failure of one rank around or before its collectives."""
    for found in swallowed(whole_projection(script)):
        yield CHECK.finding(
            "source",
            f"a rank that fails here skips {found.collective} at line {found.collective_location.line} and continues, "
            "while the others wait for it",
            remedy="Let the exception end the rank, or all-reduce whether every rank succeeded and let all of them "
            "skip the step.",
            locations=(found.location, found.collective_location),
            evidence=(
                Fact(
                    text=f"this handler catches {found.caught} and can continue as if nothing had happened",
                    basis="source",
                    location=found.location,
                ),
                Fact(
                    text=f"every rank must reach this {found.collective}",
                    basis="source",
                    location=found.collective_location,
                ),
                *_how(found),
            ),
        )


def in_run(record: RunRecord) -> Iterator[Finding]:
    """Report the exception in whose handler a rank waits for ranks that did not raise it."""
    from ddpdoctor.diagnosis.divergence.describe import disputed_call
    from ddpdoctor.diagnosis.divergence_findings import divergence_finding
    from ddpdoctor.diagnosis.divergence_kind import divergence_of

    divergence = divergence_of(record, CHECK.stands_for)
    if divergence is not None:
        yield divergence_finding(
            CHECK,
            record,
            divergence,
            f"Fix the exception on rank {divergence.culprit}, and take {disputed_call(divergence)} out of the handler: "
            "ranks that did not fail never come to it.",
        )


def _how(found: Swallowed) -> Iterator[Fact]:
    """Yield where it is raised by a condition of the rank's own, and where the handler leaves."""
    if found.raised is not None:
        test, raised = found.raised
        text = f"it is raised here, where `{test.module.excerpt(test.node)}` differs by rank"
        yield Fact(text=text, basis="source", location=test.module.location(raised))
    if found.leaving is not None:
        yield Fact(text="the rank leaves here, alone", basis="source", location=found.leaving)
