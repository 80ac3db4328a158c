"""The ranks could not meet.

What it finds
    An address of the rendezvous that was in use, a store that could not be reached, or ranks that did not come: told by
    the exception of a rank or of the launcher, and in a live run by a minute in init_process_group.

Why it is bad
    The job does not start. Until the timeout (15 to 30 minutes) it looks as if it were loading.

Example
    torchrun --nnodes=2 --node-rank=0 ...       # and on the second node --node-rank=0 as well

Remedy
    The same MASTER_ADDR, MASTER_PORT and WORLD_SIZE on all nodes, a node rank of its own for each, a port that nobody
    else uses.

When it is wrong
    Where nodes are still being booted.

References
    https://docs.pytorch.org/docs/stable/elastic/rendezvous.html
    https://docs.pytorch.org/docs/stable/distributed.html#environment-variable-initialization
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Refuted, Severity

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP705",
    name="rendezvous-failure",
    stands_for="no-rendezvous",
    severity={"run": Severity.ERROR, "log": Severity.ERROR},
    needs=frozenset({"ranks", "waits"}),
)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report why the ranks did not meet."""
    from ddpdoctor.diagnosis.failures.no_rendezvous import failed_rendezvous

    for failure in failed_rendezvous(record):
        yield CHECK.finding(
            record.job.kind,
            failure.sentence,
            remedy=failure.remedy,
            locations=() if failure.location is None else (failure.location,),
            ranks=failure.ranks,
            evidence=(Fact(text=failure.fact, basis=record.job.kind, location=failure.location),),
        )


def in_log(record: RunRecord) -> Iterator[Finding]:
    """Report why the ranks did not meet."""
    from ddpdoctor.diagnosis.logs.findings import from_log

    yield from from_log(
        CHECK,
        record,
        "Give all nodes the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE and each a node rank of its own, on a port "
        "that nobody else uses; see that the rank that holds the store lives and can be reached.",
    )
