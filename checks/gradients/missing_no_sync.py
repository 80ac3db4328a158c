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

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Severity
from ddpdoctor.fix.edits import Fix
from ddpdoctor.fix.no_sync import synchronise_once
from ddpdoctor.source.accumulation import wasteful_accumulations
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script import Script

CHECK = Check(code="DDP204", name="missing-no-sync", severity={"source": Severity.WARNING})


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
