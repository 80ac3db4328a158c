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

from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.finding import Severity

if TYPE_CHECKING:
    from ddpdoctor.diagnosis.divergence.divergence import Divergence

CHECK = Check(
    code="DDP306",
    name="early-exit",
    stands_for="early-exit",
    severity=dict.fromkeys(("rehearsal", "run", "log"), Severity.ERROR),
    needs=frozenset({"ranks", "collectives"}),
)


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


in_run = CHECK.reported_by("diagnosis.divergence_kind", "diverged", _remedy)
in_log = CHECK.reported_by("diagnosis.logs.findings", "from_dead_job", _remedy)
