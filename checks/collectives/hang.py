"""The job stands still although the ranks did not part.

What it finds
    A rank that others wait for and that does nothing: a lock, a sleep, a read that never returns, a call stuck in C.

Why it is bad
    The other ranks wait in a collective until its timeout, and the error then blames the ranks that waited.

Example
    with filelock.FileLock("cache.lock"):       # taken by a process that died
        tokens = tokenise(text)
    dist.barrier()

Remedy
    Look at the stack of the rank that is named: what it waits for is outside the collectives. Put time limits on locks,
    queues and network reads.

When it is wrong
    Where a rank sleeps on purpose for longer than the stall time, for instance while it polls for a file.

References
    https://docs.pytorch.org/docs/stable/distributed.html
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check
from ddpdoctor.diagnosis import account
from ddpdoctor.diagnosis.classify import divergence_with_code
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP305",
    name="hang",
    severity=dict.fromkeys(("rehearsal", "run", "log"), Severity.ERROR),
    needs=frozenset({"ranks", "collectives"}),
)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the standstill of the run, with the rank that stands and its stack."""
    divergence = divergence_with_code(record, CHECK.code)
    if divergence is not None:
        stuck = "the ranks" if divergence.culprit is None else f"rank {divergence.culprit}"
        yield CHECK.finding(
            record.job.kind,
            account.title(divergence),
            remedy=f"See in the stack below what {stuck} stands in; give that lock, queue or read a time limit.",
            locations=account.locations(divergence),
            ranks=account.ranks(divergence),
            evidence=account.facts(divergence, record.job.kind),
        )
