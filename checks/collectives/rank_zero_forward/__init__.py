"""One rank alone runs the DDP model, whose forward communicates.

What it finds
    A forward through the DDP module of a model with buffers (BatchNorm's statistics, for instance) that only some ranks
    run. An error when it records gradients, a warning under `no_grad`.

Why it is bad
    Such a forward broadcasts the buffers from rank 0, and the other ranks do not take part: it hangs. Under `no_grad`
    it works by luck: DDP broadcasts in the first forward after a training step only, so rank 0's broadcast in
    validation is paired with the others' next one in training. A collective in between breaks that.

Example
    if rank == 0:
        model.eval()
        with torch.no_grad():
            validate(model)             # model is the DDP module

Remedy
    Validate with model.module on that rank (it holds the same weights and does not communicate), or on all ranks.

When it is wrong
    Under `no_grad`, if only training steps follow.

References
    https://github.com/pytorch/pytorch/issues/54059
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.checks.collectives.rank_zero_forward.source import lone_forwards
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.divergence import finding_of, partings_by
from ddpdoctor.source.ranks.ranks import ranks_text
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP303",
    name="rank-zero-forward",
    stands_for="lone-forward",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=frozenset({"ranks", "collectives", "forwards"}),
    subjects=("wrap", "model"),
    triggers=("DataParallel", "ccelerat", "Fabric", "auto_model"),
)
_REMEDY = (
    "Call model.module instead of the DDP module where only some ranks validate, or let every rank run the forward."
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report forwards of a DDP model with buffers that a rank test keeps from some ranks."""
    projection = whole_projection(script)
    for parting in partings_by(projection, "forward"):
        yield finding_of(CHECK, parting, _REMEDY)
    for lone in lone_forwards(projection):
        yield CHECK.finding(
            "source",
            f"this forward of a DDP model with buffers is run by {ranks_text(lone.ranks)} only: without gradients "
            "it works only as long as its buffer broadcast is paired with the next one of training",
            remedy=_REMEDY,
            locations=(lone.location,) if lone.condition_location is None else (lone.location, lone.condition_location),
            evidence=(
                Fact(
                    text="this forward broadcasts the buffers when a training step came before",
                    basis="source",
                    location=lone.location,
                    stack=lone.chain,
                ),
            ),
            severity=Severity.WARNING,
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the divergence of the run when a lone forward caused it, or the broadcasts that met others by luck."""
    from ddpdoctor.diagnosis.divergence import describe
    from ddpdoctor.diagnosis.divergence.divergence import find_divergence
    from ddpdoctor.diagnosis.divergence_kind import divergence_of, lone_turns
    from ddpdoctor.diagnosis.training.lone_forwards import lucky_broadcasts

    basis = record.job.kind
    divergence = divergence_of(record, CHECK.stands_for)
    if divergence is not None:
        lone = lone_turns(divergence, record)
        yield CHECK.finding(
            basis,
            describe.lone_forward(divergence, lone),
            remedy=_REMEDY,
            locations=describe.locations(divergence),
            ranks=tuple(turn.rank for turn in lone),
            evidence=describe.facts(divergence, basis),
        )
    elif find_divergence(record) is None:
        for lucky in lucky_broadcasts(record):
            yield CHECK.finding(
                basis,
                lucky.sentence,
                remedy=_REMEDY,
                locations=lucky.locations,
                ranks=lucky.ranks,
                evidence=(Fact(text=lucky.pairing, basis=basis, location=lucky.locations[0]),),
                severity=Severity.WARNING,
            )
