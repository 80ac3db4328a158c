"""The ranks' replicas of one model are no longer the same.

What it finds
    Parameters that DDP manages and that differ between ranks, although their gradients were averaged: after a
    synchronised optimizer step, or before the first one. The first parameter and step are named. Parameters that DDP
    ignores, wraps with a communication hook, steps under no_sync() and manually averaged models are excluded, and where
    a more specific check knows the reason, only that one reports. In the source: a ReduceLROnPlateau that every rank
    steps with its own loss, which leads there in some epoch that a rehearsal does not reach.

Why it is bad
    DDP averages gradients and never compares weights. With different weights, the averaged gradient fits none of the
    replicas: training degrades, and rank 0 saves a model that was never trained as such.

Example
    model = DistributedDataParallel(net)
    if rank == 0:
        model.module.load_state_dict(torch.load("last.pt"))     # after the wrap: the others never get it

Remedy
    Load and initialise before the wrap, or on every rank. Give all ranks the same learning rate, averaging the loss
    that a scheduler is stepped with, and change gradients after backward in the same way everywhere.

When it is wrong
    If the ranks are meant to diverge for a while (local SGD) in a way that was not recognised.

References
    https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.checks.gradients.diverged_replicas.source import own_plateaus
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.record.streams.stream_names import AVERAGING
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.checks.gradients.shared.diverged_run import Diverged
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP208",
    name="diverged-replicas",
    severity={"source": Severity.WARNING, "rehearsal": Severity.ERROR, "run": Severity.ERROR},
    needs=AVERAGING | {"collectives", "parameter_digests", "training_states"},
    subjects=("training",),
    triggers=("ReduceLROnPlateau",),
)
REMEDIES = {
    "after-the-wrap": "Change or load the parameters before the wrap, or in the same way on every rank.",
    "learning-rates": "Give the optimizer the same learning rate on every rank.",
    "gradients": "Change gradients after backward (clipping, noise, skipped values) in the same way on every rank.",
    "unknown": "Look for code that sets parameters or optimizer state on some ranks only.",
}


def in_source(script: Script) -> Iterator[Finding]:
    """Report learning rates that part as soon as a plateau shows on one rank and not on another."""
    for event in own_plateaus(whole_projection(script)):
        place = event.module.location(event.node)
        yield CHECK.finding(
            "source",
            "each rank lowers its learning rate by its own loss: once the rates differ, equal gradients lead to "
            "different models",
            remedy=(
                "Average the value over the ranks with dist.all_reduce, on all ranks, before passing it to the "
                "scheduler."
            ),
            locations=(place,),
            evidence=(
                Fact(
                    text="this value comes from the rank's own batches, and was not reduced",
                    basis="source",
                    location=place,
                    stack=event.chain,
                ),
            ),
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the first moment at which replicas differ."""
    from ddpdoctor.checks.gradients.shared.diverged_run import diverged_replicas
    from ddpdoctor.diagnosis.wording import rank_list

    for found in diverged_replicas(record):
        when = f"after step {found.step} of the optimizer" if found.step else "before the first optimizer step"
        differ = Fact(
            text=f"{found.unequal:,} of {found.compared:,} parameters differ: {', '.join(found.names)}",
            basis=record.job.kind,
            numbers={"parameters": found.unequal, "compared": found.compared, "step": found.step},
        )
        yield CHECK.finding(
            record.job.kind,
            f"the parameters of {found.model} differ between {rank_list(found.ranks)} {when}, {found.first_name} first",
            remedy=REMEDIES[found.cause],
            locations=tuple(dict.fromkeys(p for p in (found.location, found.wrap_location) if p is not None)),
            ranks=found.ranks,
            evidence=(
                differ,
                *_reasons(record, found),
                Fact(text="the model is wrapped here", basis=record.job.kind, location=found.wrap_location),
            ),
        )


def _reasons(record: RunRecord, found: Diverged) -> Iterator[Fact]:
    if found.cause == "learning-rates":
        rates = (f"rank {rank}: {rates}" for rank, rates in zip(found.ranks, found.learning_rates, strict=True))
        yield Fact(text=f"the learning rates differ ({'; '.join(rates)})", basis=record.job.kind)
    elif found.cause == "gradients":
        yield Fact(
            text="DDP averaged the gradients, and before the step they differ again: something changed them since",
            basis=record.job.kind,
        )
    elif found.step:
        yield Fact(text="the gradients that the step used are the same on all ranks", basis=record.job.kind)
