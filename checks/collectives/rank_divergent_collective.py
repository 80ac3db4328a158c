"""Ranks run different collectives.

What it finds
    A collective, or a backward of the DDP model, that a rank test keeps from some ranks: by a branch, by leaving a
    function or a loop early, by an exception that is caught, by a loop's bound. In a run: the first place where the
    ranks' next collectives come from different lines and do not fit. Constructing DDP, creating a group and running a
    forward on some ranks only have their own checks.

Why it is bad
    A collective waits for every rank of its group. A rank that never calls it leaves the others waiting until the
    timeout, 10 to 30 minutes later; where the sizes happen to fit, ranks exchange numbers that mean different things.

Example
    if rank == 0:
        dist.all_reduce(total)          # ranks 1.. never come here

Remedy
    Call the collective on every rank and put only its consequences (printing, saving) under the rank test.

When it is wrong
    Where the other ranks reach a matching collective elsewhere; a run that ends well proves it.

References
    https://docs.pytorch.org/docs/stable/distributed.html
    https://github.com/pytorch/pytorch/issues/54059
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check, RunRecord, Script
from ddpdoctor.finding import Finding, Refuted, Severity, of_frame
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.divergence import SAME_ORDER, finding_of, partings_by, remedy_of

if TYPE_CHECKING:
    from ddpdoctor.diagnosis.divergence.divergence import Divergence

CHECK = Check(
    code="DDP301",
    name="rank-divergent-collective",
    stands_for="rank-branch",
    severity=dict.fromkeys(("source", "rehearsal", "run", "log"), Severity.ERROR),
    needs=frozenset({"ranks", "collectives"}),
    subjects=("collectives",),
    triggers=(
        "distributed",
        "Distributed",
        "ccelerat",
        "horovod",
        "ightning",
        "mmengine",
        "mmcv",
        "detectron2",
        "composer",
        "ransformers",
    ),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report collectives that a rank test keeps from some ranks, with nothing that matches them on the others."""
    for parting in partings_by(whole_projection(script), "collective"):
        yield finding_of(CHECK, parting, remedy_of(parting))


def _remedy(divergence: Divergence) -> str:
    from ddpdoctor.diagnosis.divergence import describe
    from ddpdoctor.diagnosis.divergence.aborted import is_in_backward

    if divergence.form == "standstill" and len({turn.group for turn in divergence.turns}) > 1:
        return "Use the groups in the same order on every rank."
    if divergence.form == "standstill" and all(turn.row is not None for turn in divergence.turns):
        return SAME_ORDER
    remedy = (
        f"Make every rank call {describe.disputed_call(divergence)}, or none: move it out of the branch that only some "
        "ranks take."
    )
    if any(map(is_in_backward, divergence.turns)):
        remedy += " Where it comes after the loop, the ranks made different numbers of steps: let none leave one out."
    return remedy


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the first place where the ranks' collectives do not fit; refute where all of them met at a call."""
    from ddpdoctor.diagnosis.divergence_kind import diverged, met_calls
    from ddpdoctor.diagnosis.wording import count

    yield from diverged(CHECK, record, _remedy)
    for chain, times in met_calls(record):
        if chain:
            reason = f"all ranks met at this call, {count(times, 'time')}, and ran to their end"
            yield Refuted(location=of_frame(chain[0]), reason=reason, chain=chain)


in_log = CHECK.reported_by("diagnosis.logs.findings", "from_dead_job", _remedy)
