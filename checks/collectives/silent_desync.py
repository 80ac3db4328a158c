"""Nothing hangs, but ranks exchange numbers that do not belong together.

What it finds
    Ranks whose step counters differ when DDP averages their gradients: one of them skipped or repeated a backward, and
    from then on gradients of different steps are averaged. As a warning: two lines whose collectives are paired
    crosswise (A with B, then B with A).

Why it is bad
    No error, exit code 0, wrong gradients from that step on. Often it sticks only at the end of training, when one rank
    has a step more than the others, far from the cause.

Example
    if loss > 100:                      # true on one rank only
        continue                        # skips backward there
    loss.backward()

Remedy
    Decide together: all-reduce the condition so that all ranks skip, or keep the backward and multiply the loss by 0.

When it is wrong
    The crosswise pairing, where either branch of a rank's own choice reduces the same quantity.

References
    https://docs.pytorch.org/docs/stable/notes/ddp.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.finding import Finding, Refuted, Severity

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP312",
    name="silent-desync",
    severity=dict.fromkeys(("rehearsal", "run", "log"), Severity.ERROR),
    needs=frozenset({"ranks", "collectives"}),
)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the divergence of the run when ranks pair different steps, or lines crosswise."""
    from ddpdoctor.diagnosis.accusations import accuse
    from ddpdoctor.diagnosis.classify import divergence_with_code

    divergence = divergence_with_code(record, CHECK.code)
    if divergence is None:
        return
    crossed = divergence.form == "crossed"
    yield accuse(
        CHECK,
        record,
        divergence,
        "Call the two collectives in the same order on every rank."
        if crossed
        else "Let all ranks skip a step together (all-reduce the condition first), or run backward on every rank and "
        "multiply the loss by 0 where it should not count.",
        Severity.WARNING if crossed else None,
    )
