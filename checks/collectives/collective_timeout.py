"""A collective timed out and ended the job.

What it finds
    The timeout of NCCL's watchdog or of gloo as the first failure: which collective timed out, and which ranks did not
    reach it. If the ranks' collectives show why they did not, that is reported instead.

Why it is bad
    The error names the ranks that waited. The rank that did not arrive has often printed nothing, and a longer timeout
    only makes the next wait longer.

Example
    if rank == 0:
        evaluate(model)                 # longer than the timeout
    loss.backward()

Remedy
    Look at what the absent rank did at that time. If it was legitimate work, divide it or give the group a longer
    timeout; if it was stuck, its stack shows where.

When it is wrong
    If the network failed, all ranks arrived and none could reach another: then no absent rank is named.

References
    https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
    https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Refuted, Severity

if TYPE_CHECKING:
    from ddpdoctor.checks.collectives.divergences_run import TimedOut
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP308",
    name="collective-timeout",
    stands_for="timeout",
    severity={"run": Severity.ERROR, "log": Severity.ERROR},
    needs=frozenset({"ranks"}),
)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the timeout that ended the job."""
    from ddpdoctor.checks.collectives.divergences_run import timed_out
    from ddpdoctor.diagnosis.wording import location_of, rank_list

    struck = timed_out(record)
    if struck is None:
        return
    location = location_of(struck.frame)
    numbers: dict[str, int | float] = {"timeout_s": struck.timeout_ns / 1e9}
    if struck.sequence is not None:
        numbers["sequence"] = struck.sequence
    facts = [Fact(text=f"rank {struck.ranks[0]}: {struck.message}", basis=record.job.kind, numbers=numbers)]
    if struck.agreed is not None:
        text = f"the last collective that all ranks reached is number {struck.agreed:,}"
        facts.append(Fact(text=text, basis=record.job.kind, numbers={"sequence": struck.agreed}))
    yield CHECK.finding(
        record.job.kind,
        _title(struck),
        remedy=f"Look at what {rank_list(struck.absent)} did meanwhile: divide that work, or give the group a timeout "
        "that covers it."
        if struck.absent
        else "Compare the ranks' last lines and stacks; if all of them wait in this collective, look at the network.",
        locations=location,
        ranks=struck.absent,
        evidence=tuple(facts),
    )


def _title(struck: TimedOut) -> str:
    from ddpdoctor.diagnosis.wording import duration_text, place, rank_list

    what = {"": "a collective", "gradients": "the reduction of gradients"}.get(struck.kind, struck.kind)
    number = f" #{struck.sequence:,}" if struck.sequence is not None else ""
    at = f" at {place(struck.frame)}" if struck.frame is not None else ""
    after = f" after {duration_text(struck.timeout_ns)}" if struck.timeout_ns else ""
    waited = f"{rank_list(struck.ranks)} timed out in {what}{number}{at}{after}"
    if not struck.absent:
        return waited
    return f"{waited}: {rank_list(struck.absent)} did not arrive"
