"""A process group is made by some ranks only.

What it finds
    A call of `new_group` that a rank test keeps from some ranks.

Why it is bad
    Every rank of the job has to call `new_group`, members or not, and in the same order: the ranks agree on the new
    group through the store. The ranks that call it wait there, in no collective, so that neither the flight recorder
    nor the watchdog of NCCL names it.

Example
    if rank in (0, 1):
        pair = dist.new_group([0, 1])       # ranks 2.. never come here

Remedy
    Call new_group on every rank and use the group on its members only; or pass use_local_synchronization=True, with
    which only the members take part.

When it is wrong
    Not known to be.

References
    https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.new_group
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.divergence import evidence_of, in_words, partings_by, places_of
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script import Script

CHECK = Check(code="DDP309", name="subset-new-group", severity={"source": Severity.ERROR})


def in_source(script: Script) -> Iterator[Finding]:
    """Report groups that a rank test lets only some ranks make."""
    for parting in partings_by(whole_projection(script), "group"):
        yield CHECK.finding(
            "source",
            in_words(parting),
            remedy="Move new_group out of the rank test, so that every rank calls it, or pass "
            "use_local_synchronization=True.",
            locations=places_of(parting),
            evidence=evidence_of(parting),
            severity=Severity.WARNING if parting.guessed else None,
        )
