"""DDP is constructed on some ranks only.

What it finds
    A construction of DistributedDataParallel on the default group that a rank test keeps from some ranks.

Why it is bad
    The constructor is a collective: it compares the parameters of all ranks and broadcasts those of rank 0. The ranks
    that build it wait for the others until the timeout; later every backward would wait for them as well.

Example
    if rank == 0:
        model = DDP(model)              # ranks 1.. train the bare model

Remedy
    Build DDP on every rank of its group. To train on some of the ranks, make a group of them and pass it as
    process_group.

When it is wrong
    If the other ranks construct theirs in code that the source does not show.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.divergence import finding_of, partings_by
from ddpdoctor.source.ranks.ranks import ranks_text

CHECK = Check(
    code="DDP314",
    name="ddp-on-subset",
    stands_for="ddp-on-subset",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=frozenset({"ranks", "collectives", "wraps", "backwards"}),
    subjects=("wrap",),
    triggers=("DataParallel",),
)
_REMEDY = "Build DDP on every rank, or pass a process_group that holds only the ranks that build it."


def in_source(script: Script) -> Iterator[Finding]:
    """Report DDP constructions that a rank test lets only some ranks come to."""
    for parting in partings_by(whole_projection(script), "wrap"):
        yield finding_of(
            CHECK,
            parting,
            _REMEDY,
            f"only {ranks_text(parting.running)} can build DDP here, on the default group of all ranks; "
            f"{ranks_text(parting.missing)} cannot",
        )


in_run = CHECK.reported_by("diagnosis.divergence_kind", "diverged", lambda _: _REMEDY)
