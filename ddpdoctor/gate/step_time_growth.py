"""A step takes longer than in the revision that it is compared with.

What it finds
    With `--against REV --allowed-time-growth 5%`: in pairs of rehearsals, one of each revision and by turns first, a
    step of this one takes longer by more than is allowed, with the whole 95% interval of the pairs above it.

Why it is bad
    Every step of the job will take longer.

Example
    for batch in loader:
        time.sleep(0.05)  # stands for work that the loader's workers did before

Remedy
    Look at what changed in the step since that revision; `ddpdoctor profile` says where its time goes.

When it is wrong
    A rehearsal runs few ranks, on a CPU if need be, and small batches: shares of the step differ from the job's.

References
    https://pytorch.org/tutorials/recipes/recipes/benchmark.html
"""

from __future__ import annotations

from ddpdoctor.check import Check, LoadedCheck
from ddpdoctor.examination import TimeComparison
from ddpdoctor.finding import Fact, Finding, Severity
from ddpdoctor.gate.budget import percent

CHECK = Check(code="DDP903", name="step-time-growth", severity={"rehearsal": Severity.ERROR})
LOADED = LoadedCheck(check=CHECK, documentation=__doc__ or "")


def finding(times: TimeComparison, against: str) -> Finding:
    """Return the finding for steps that became slower."""
    fact = Fact(
        text=f"{times.pairs} pairs of rehearsals: {times.before_ms:.1f} ms a step before, {times.now_ms:.1f} ms now;"
        f" 95% interval {times.low:+.1%} to {times.high:+.1%}, allowed {percent(times.allowed)}",
        basis="rehearsal",
        numbers={"before_ms": times.before_ms, "now_ms": times.now_ms, "low": times.low, "high": times.high},
    )
    return CHECK.finding(
        f"a step takes {percent(times.change)} longer than in {against}",
        basis="rehearsal",
        remedy="Look at what changed in the step; `ddpdoctor profile` shows where its time goes.",
        evidence=(fact,),
    )
