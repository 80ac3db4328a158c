"""Nothing hangs, but ranks exchange numbers that do not belong together.

What it finds
    Ranks whose step counters differ when DDP averages their gradients: one of them skipped or repeated a backward, and
    from then on gradients of different steps are averaged. Ranks that go through one loop in different orders, so that
    a collective mixes up two tensors of one shape, told apart by the key, variable or parameter that the turn is about.
    As a warning: two lines whose collectives are paired crosswise (A with B, then B with A).

Why it is bad
    No error, exit code 0, wrong gradients from that step on. Often it sticks only at the end of training, when one rank
    has a step more than the others, far from the cause.

Example
    if loss > 100:                      # true on one rank only
        continue                        # skips backward there
    loss.backward()

Remedy
    Decide together: all-reduce the condition so that all ranks skip, or keep the backward and multiply the loss by 0.
    Go over sorted names, not over a set or a dict that each rank fills in its own order.

When it is wrong
    The warning, where a rank chooses by itself between two branches that reduce the same quantity.

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
_REMEDIES = {
    "crossed": "Call the two collectives in the same order on every rank.",
    "swapped": "Go over the same order on every rank, such as sorted names.",
}
_SKIP_TOGETHER = (
    "Let all ranks skip a step together (all-reduce the condition first), or run backward on every rank and multiply "
    "the loss by 0 where it should not count."
)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the divergence of the run when ranks pair different steps, or lines crosswise."""
    from ddpdoctor.diagnosis.accusations import accuse
    from ddpdoctor.diagnosis.classify import divergence_with_code

    divergence = divergence_with_code(record, CHECK.code)
    if divergence is None:
        return
    severity = Severity.WARNING if divergence.form == "crossed" else None
    yield accuse(CHECK, record, divergence, _REMEDIES.get(divergence.form, _SKIP_TOGETHER), severity)
