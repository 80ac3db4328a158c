"""The ranks' replicas of one model are no longer the same.

What it finds
    Parameters that DDP manages and that differ between ranks, although their gradients were averaged: after a
    synchronised optimizer step, or before the first one. The first parameter and step are named. Parameters that DDP
    ignores, wraps with a communication hook, steps under no_sync() and manually averaged models are excluded, and where
    a more specific check knows the reason, only that one reports. In the source: a ReduceLROnPlateau that every rank
    steps with its own loss, which leads there in some epoch that a rehearsal does not reach; and a scheduler or an
    optimizer that steps, a learning rate that is set, parameters that are frozen, or weights that are loaded after the
    wrap, on some ranks only.

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
from ddpdoctor.checks.gradients.diverged_replicas.source import LoneChange, lone_changes, own_plateaus
from ddpdoctor.diagnosis.wording import rank_list
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.record.streams.setup import AVERAGING
from ddpdoctor.source.interpreter.values import RANKS
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
    triggers=("DistributedDataParallel", "ReduceLROnPlateau", "ccelerat", "Fabric", "auto_model"),
)
REMEDIES = {
    "after-the-wrap": "Change or load the parameters before the wrap, or in the same way on every rank.",
    "learning-rates": "Give the optimizer the same learning rate on every rank.",
    "gradients": "Change gradients after backward (clipping, noise, skipped values) in the same way on every rank.",
    "unknown": "Look for code that sets parameters or optimizer state on some ranks only.",
}


def in_source(script: Script) -> Iterator[Finding]:
    """Report what ranks change apart: by a plateau that one of them shows alone, or because only some come there."""
    yield from _lone_changes(script)
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


_LONE = {
    "schedule": ("the learning-rate scheduler steps on {ranks} only, so the ranks train with different rates", "Step"),
    "step": ("the optimizer steps on {ranks} only, so the parameters of the others stay what they were", "Step"),
    "setting": (
        "a setting of the optimizer changes on {ranks} only, so equal gradients change models apart",
        "Set it",
    ),
    "freeze": (
        "parameters are frozen or unfrozen on {ranks} only: DDP fails when it compares the models, or ranks wait for "
        "gradients that others do not send",
        "Freeze the same parameters",
    ),
    "load": ("weights are loaded on {ranks} only, after DDP made the replicas alike", "Load"),
}


def _lone_changes(script: Script) -> Iterator[Finding]:
    for change in lone_changes(whole_projection(script)):
        event, guard = change.event, change.guard
        place = event.module.location(event.node)
        ranks = tuple(rank for rank in RANKS if event.ranks >> rank & 1)
        title, verb = _LONE[change.what]
        condition = guard.module.excerpt(guard.node, 60)
        yield CHECK.finding(
            "source",
            title.format(ranks=rank_list(ranks)),
            remedy=f"{verb} on every rank: move it out of `if {condition}`.",
            locations=(place,),
            severity=Severity.ERROR,
            evidence=(
                Fact(
                    text=f"of {len(RANKS)} ranks only {rank_list(ranks)} comes here, by `{condition}`",
                    basis="source",
                    location=guard.module.location(guard.node),
                    stack=event.chain,
                ),
                *_steps_of_all(change),
            ),
        )


def _steps_of_all(change: LoneChange) -> Iterator[Fact]:
    """Yield the step of all ranks, the place at which a run shows what the change does."""
    if change.step is not None and change.step.node is not change.event.node:
        place = change.step.module.location(change.step.node)
        yield Fact(text="every rank steps the optimizer here", basis="source", location=place)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the first moment at which replicas differ."""
    from ddpdoctor.checks.gradients.shared.diverged_run import diverged_replicas

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
