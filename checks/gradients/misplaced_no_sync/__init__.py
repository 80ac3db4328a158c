"""no_sync() is in the wrong place.

What it finds
    `no_sync()` around every training forward, or around the very micro-step after which the optimizer steps: the
    gradients are never averaged (error). `no_sync()` around the backward only: they are averaged nevertheless
    (warning). `model.require_backward_grad_sync = False` does what no_sync() does, and is read like it.

Why it is bad
    DDP decides in its forward whether the next backward synchronises. A step on gradients that were not averaged makes
    the ranks' weights drift apart, silently. Around backward alone the context does nothing: all the traffic that it
    should save is sent.

Example
    loss = model(batch)
    with model.no_sync():
        loss.backward()

Remedy
    Put forward and backward under no_sync() for all micro-steps but the last, which has to run outside of it.

When it is wrong
    Where parameters are averaged at intervals (local SGD) in a way that was not recognised.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html#torch.nn.parallel.DistributedDataParallel.no_sync
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.checks.gradients.misplaced_no_sync.source import MisplacedNoSync, misplaced_no_syncs
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.record.streams.setup import AVERAGING
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.checks.gradients.shared.accumulation_run import LateNoSync
    from ddpdoctor.diagnosis.training.unaveraged import Unaveraged
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP217",
    name="misplaced-no-sync",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=AVERAGING | {"collectives", "passes"},
    subjects=("wrap", "loss"),
    triggers=("no_sync", "require_backward_grad_sync"),
)
REMEDY = (
    "Disable synchronisation, by no_sync() around forward and backward or by require_backward_grad_sync, for all "
    "micro-steps but the last of each step."
)
TITLES = {
    "never-synchronised": "synchronisation is off in every training forward, so the gradients are never averaged",
    "last-unsynchronised": "synchronisation is off in the micro-step after which the optimizer steps, so its gradients "
    "are not averaged",
    "backward-only": "no_sync() around the backward alone has no effect: DDP decided in the forward to synchronise",
}


def in_source(script: Script) -> Iterator[Finding]:
    """Report each no_sync that leaves gradients unaveraged or saves nothing."""
    for found in misplaced_no_syncs(whole_projection(script)):
        yield CHECK.finding(
            "source",
            TITLES[found.mistake],
            remedy=REMEDY,
            locations=(found.context.module.location(found.context.node),),
            evidence=tuple(_facts(found)),
            severity=Severity.WARNING if found.mistake == "backward-only" else None,
        )


def _facts(found: MisplacedNoSync) -> Iterator[Fact]:
    backward = found.backward
    yield Fact(text="this is the backward", basis="source", location=backward.module.location(backward.node))
    if found.step is not None:
        yield Fact(
            text="this step uses its gradients", basis="source", location=found.step.module.location(found.step.node)
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report steps on gradients that no_sync kept from being averaged, and contexts that come too late."""
    from ddpdoctor.checks.gradients.shared.accumulation_run import late_no_syncs
    from ddpdoctor.diagnosis.training.unaveraged import unaveraged

    yield from (_unaveraged(record, found) for found in unaveraged(record) if found.why == "no-sync")
    yield from (_late(record, late) for late in late_no_syncs(record))


def _unaveraged(record: RunRecord, found: Unaveraged) -> Finding:
    return CHECK.finding(
        record.job.kind,
        TITLES["last-unsynchronised" if found.ever_synchronised else "never-synchronised"]
        + f": they differ between ranks in {found.steps_affected} of {found.steps_compared} steps",
        remedy=REMEDY,
        locations=() if found.location is None else (found.location,),
        evidence=found.facts(record.job.kind),
    )


def _late(record: RunRecord, late: LateNoSync) -> Finding:
    return CHECK.finding(
        record.job.kind,
        TITLES["backward-only"],
        remedy=REMEDY,
        locations=() if late.location is None else (late.location,),
        evidence=(
            Fact(
                text=f"{late.backwards} backwards of {late.model} under no_sync() were synchronised nevertheless",
                basis=record.job.kind,
                numbers={"backwards": late.backwards},
            ),
        ),
        severity=Severity.WARNING,
    )
