"""One rank exited while the others wait for it.

What it finds
    A rank that ended (its script returned, called sys.exit, or was killed by a signal) while other ranks wait in a
    collective that it never entered.

Why it is bad
    The others hang until the timeout, or fail with "Connection closed by peer", which hides which rank left first.

Example
    if not torch.isfinite(loss):
        sys.exit(1)                     # only the rank with the bad batch leaves

Remedy
    Decide together: all-reduce the reason for leaving, so that all ranks leave in the same step.

When it is wrong
    Where the launcher is meant to restart the job after one rank has left (elastic training).

References
    https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.finding import Finding, Refuted, Severity

if TYPE_CHECKING:
    from ddpdoctor.diagnosis.divergence.divergence import Divergence
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP306",
    name="early-exit",
    stands_for="early-exit",
    severity=dict.fromkeys(("rehearsal", "run", "log"), Severity.ERROR),
    needs=frozenset({"ranks", "collectives"}),
)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the divergence of the run when a rank left without an exception."""
    from ddpdoctor.diagnosis.divergence_kind import divergence_finding, divergence_of

    divergence = divergence_of(record, CHECK.stands_for)
    if divergence is not None:
        yield divergence_finding(CHECK, record, divergence, _remedy(divergence))


def _remedy(divergence: Divergence) -> str:
    if any(turn.action == "signalled" and turn.rank == divergence.culprit for turn in divergence.turns):
        return (
            "Find out what killed it: the kernel when memory ran out (`dmesg | grep -i oom`), the scheduler, or the "
            "script itself."
        )
    return (
        "Let all ranks leave together: all-reduce the reason for leaving first, or run the missing collectives on the "
        "rank that leaves."
    )


def in_log(record: RunRecord) -> Iterator[Finding]:
    """Report a rank that left without saying why, by the logs or by the others' collectives in the dumps."""
    from ddpdoctor.diagnosis.logs.findings import from_dumps, from_log

    yield from from_dumps(CHECK, record, _remedy)
    yield from from_log(CHECK, record)
