"""Gradients are accumulated over several backward passes, and every one of them synchronises.

What it finds
    A training loop that steps the optimizer after several backward passes through DDP, in a script that never uses
    `no_sync()`.

Why it is bad
    Each backward all-reduces all gradients, though only the sum before the step is needed. With n micro-steps the job
    sends n times the bytes, and waits for the slowest rank n times a step.

Example
    for i, batch in enumerate(loader):
        (model(batch).mean() / 8).backward()        # all-reduces every time
        if (i + 1) % 8 == 0:
            optimizer.step()

Remedy
    Run forward and backward of all micro-steps but the last under model.no_sync():
    context = contextlib.nullcontext() if last else model.no_sync().

When it is wrong
    Where the number of micro-steps is 1 in practice. require_backward_grad_sync set by hand and Accelerate's
    accumulate() are recognised.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html#torch.nn.parallel.DistributedDataParallel.no_sync
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.checks.gradients.missing_no_sync.fix import synchronise_once
from ddpdoctor.checks.gradients.shared.accumulation_source import wasteful_accumulations
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.fix.edits import Fix
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP204",
    name="missing-no-sync",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"wraps", "forwards", "backwards", "optimizer_steps"}),
    needs_live=frozenset({"wraps", "loaders", "passes", "step_tracks"}),
    subjects=("training",),
    triggers=("DistributedDataParallel", "ccelerat", "Fabric", "auto_model"),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report backward passes that synchronise although the step comes later."""
    for found in wasteful_accumulations(whole_projection(script)):
        backward, step = found.backward, found.step
        yield CHECK.finding(
            "source",
            "every micro-step of this gradient accumulation synchronises all gradients",
            remedy="Run forward and backward of all micro-steps but the last under model.no_sync().",
            locations=(backward.module.location(backward.node),),
            evidence=(
                Fact(
                    text="the optimizer steps once for several of these backward passes",
                    basis="source",
                    location=step.module.location(step.node),
                ),
            ),
        )


def fixes(script: Script, finding: Finding) -> Iterator[Fix]:
    """Offer to run all micro-steps but the last under no_sync."""
    projection = whole_projection(script)
    for found in wasteful_accumulations(projection):
        if found.backward.module.location(found.backward.node) == finding.location:
            yield from synchronise_once(projection, found, finding)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report wraps that reduce their gradients several times for one step; refute it where each step has one backward.

    A `no_sync()` that comes too late to have an effect is reported by misplaced-no-sync alone.
    """
    from ddpdoctor.checks.gradients.shared.accumulation_run import late_no_syncs, reductions
    from ddpdoctor.diagnosis.wording import bytes_text, site_location

    misplaced = {late.wrap for late in late_no_syncs(record)}
    for found in reductions(record):
        places = tuple(place for site in found.sites if (place := site_location(record.site(site))) is not None)
        if not found.several:
            reason = f"each of {found.steps} steps followed one reduction"
            yield from (Refuted(location=place, reason=reason) for place in places)
        elif 2 * found.several > found.steps and found.several > 1 and found.wrap not in misplaced:
            yield CHECK.finding(
                record.job.kind,
                f"{found.per_step} backward passes before each optimizer step synchronise all gradients of "
                f"{found.model}: {bytes_text(found.wasted_bytes)} a step are sent for nothing",
                remedy="Run forward and backward of all micro-steps but the last under model.no_sync().",
                locations=places,
                evidence=(
                    Fact(
                        text=f"{found.several} of {found.steps} optimizer steps came after several reductions",
                        basis=record.job.kind,
                        numbers={
                            "reductions_per_step": found.per_step,
                            "wasted_bytes_per_step": found.wasted_bytes,
                            "steps": found.steps,
                        },
                        location=found.step_location,
                    ),
                ),
            )
