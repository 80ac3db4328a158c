"""The ranks wait for one that is busy with something long.

What it finds
    Preprocessing of a data set (`dataset.map`) or generation in a loop (`model.generate`) that only the first rank
    does, while the others go on to their next collective, in a script that keeps the default timeout. In a run: a wait
    of half the group's timeout or more; an error when the timeout struck.

Why it is bad
    The others stand in that collective until the first rank comes: all but one GPU idle. Once the work takes longer
    than the timeout of the group (10 minutes with NCCL, 30 with gloo), the job is ended: with all the data, not in the
    test with a little.

Example
    if rank == 0:
        dataset = raw.map(tokenize)         # 25 minutes on the whole corpus
    dist.barrier()                          # NCCL gives up after 10

Remedy
    Divide the work between the ranks, or do it before the job. Where one rank must do it, pass
    timeout=timedelta(hours=2) to init_process_group.

When it is wrong
    Where the work is short, or its result is cached from an earlier run.

References
    https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.long_waits import long_waits
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script import Script

if TYPE_CHECKING:
    from ddpdoctor.diagnosis.long_waits import LongWait
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP307",
    name="long-wait",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"ranks", "collectives"}),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report long work of the first rank with a collective behind it."""
    for wait in long_waits(whole_projection(script)):
        yield CHECK.finding(
            "source",
            f"the first rank {wait.what} here while the others wait in {wait.collective} at line "
            f"{wait.collective_location.line}, for no longer than the default timeout",
            remedy="Divide the work between the ranks or do it before the job; or give init_process_group a timeout "
            "that covers it.",
            locations=(wait.location, wait.collective_location, wait.condition_location),
            evidence=(
                Fact(
                    text=f"`{wait.condition}` lets the first rank through",
                    basis="source",
                    location=wait.condition_location,
                ),
                Fact(
                    text=f"the others wait in this {wait.collective}",
                    basis="source",
                    location=wait.collective_location,
                ),
            ),
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the wait that came nearest to its timeout, or went beyond it."""
    from ddpdoctor.diagnosis.long_waits import longest_wait
    from ddpdoctor.diagnosis.wording import duration_text, location_of

    wait = longest_wait(record)
    if wait is None:
        return
    busy = None if wait.before is None else location_of(wait.before.line)
    place_of_wait = location_of(wait.turn.line)
    yield CHECK.finding(
        record.job.kind,
        _told(wait),
        remedy="Divide the work between the ranks or do it before the job; or give the group a timeout that covers it.",
        locations=tuple(location for location in (place_of_wait, busy) if location is not None),
        ranks=wait.late,
        evidence=(
            Fact(
                text=f"the timeout of the group is {duration_text(wait.timeout_ns)}",
                basis=record.job.kind,
                numbers={"waited_s": wait.waited_ns / 1e9, "timeout_s": wait.timeout_ns / 1e9},
                location=place_of_wait,
            ),
        ),
        severity=Severity.ERROR if wait.timed_out else None,
    )


def _told(wait: LongWait) -> str:
    from ddpdoctor.diagnosis.wording import collective, duration_text, place, rank_list

    assert wait.turn.signature is not None
    waited = f"{rank_list(wait.waiting)} waited {duration_text(wait.waited_ns)} in {collective(wait.turn.signature)}"
    late = f" at {place(wait.turn.line)} for {rank_list(wait.late)}"
    if wait.before is not None and wait.before.line is not None:
        doing = "busy at" if wait.before.action == "elsewhere" else "busy since"
        late += f", {doing} {place(wait.before.line)}"
    limit = duration_text(wait.timeout_ns)
    ended = f", until the timeout of {limit} ended the job" if wait.timed_out else f"; the timeout is {limit}"
    return waited + late + ended
