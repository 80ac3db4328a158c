"""The timeout of a process group is shorter than the ranks' normal waits.

What it finds
    In a live run: a wait for a busy rank that ended well, and that was longer than the timeout of another process group
    which the busy rank is in.

Why it is bad
    Nothing went wrong, because the ranks waited in a group with a longer timeout. The same work before a collective of
    the other group ends the job; more data, a slower disk or one more batch of validation can cause that.

Example
    fast = dist.new_group(timeout=timedelta(seconds=30))
    if rank == 0:
        validate(model.module)              # 50 s
    dist.barrier()                          # the default group: 30 minutes

Remedy
    Give that group a timeout well above the longest normal wait.

When it is wrong
    Where the group is never used after work that takes so long.

References
    https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.new_group
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Refuted, Severity

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP310",
    name="timeout-unfit",
    severity={"run": Severity.ADVICE},
    needs=frozenset({"groups", "step_tracks", "call_tracks"}),
)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report waits that another group would not have survived."""
    from ddpdoctor.checks.collectives.live_waits_run import unfit_timeouts, wait_text
    from ddpdoctor.diagnosis.wording import duration_text, group_name, site_location

    for wait, number in unfit_timeouts(record):
        group = record.groups[number]
        place = site_location(wait.site)
        name = group_name(group, record.job.world_size)
        yield CHECK.finding(
            "run",
            f"{wait_text(wait)}, and {name} would have timed out after {duration_text(group.timeout_ns)}",
            remedy=f"Give {name} a timeout well above {duration_text(wait.waited_ns)}.",
            locations=place,
            ranks=wait.late,
            evidence=(
                Fact(
                    text=f"the longest wait was {duration_text(wait.waited_ns)}",
                    basis="run",
                    numbers={"waited_s": wait.waited_ns / 1e9, "timeout_s": group.timeout_ns / 1e9},
                    location=place,
                ),
            ),
        )
