"""The last micro-batches of an epoch are not followed by an optimizer step.

What it finds
    Gradient accumulation whose step depends on the position in the pass over the loader alone, `(i + 1) % n == 0`,
    without a step for the batches that are left at the end. In a run: a whole pass that ended so; one that the
    rehearsal cut says nothing.

Why it is bad
    Unless n divides the number of batches, the gradients of the last ones are discarded or added to the first step of
    the next epoch. With no_sync() those were never averaged: they differ between ranks.

Example
    for i, batch in enumerate(loader):
        (model(batch).mean() / 8).backward()
        if (i + 1) % 8 == 0:
            optimizer.step()
            optimizer.zero_grad()

Remedy
    Step at the end too: if (i + 1) % 8 == 0 or i + 1 == len(loader); or cut every pass to a multiple of n batches,
    deliberately dropping the rest.

When it is wrong
    Where n divides the number of batches, or losing a few batches an epoch is accepted.

References
    https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.checks.gradients.missing_no_sync import forgotten_tails
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.projection import whole_projection

CHECK = Check(
    code="DDP216",
    name="accumulation-tail",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ADVICE),
    needs=frozenset({"wraps", "passes", "backwards", "optimizer_steps"}),
    subjects=("training-loader",),
    triggers=("enumerate",),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report tests for the step that leave out the end of the pass."""
    for found in forgotten_tails(whole_projection(script)):
        step = found.step
        if found.condition is None:
            continue
        yield CHECK.finding(
            "unless the number of batches is a multiple, the last ones of an epoch are not followed by a step",
            remedy="Step after the last batch as well: add `or i + 1 == len(loader)` to this test.",
            locations=step.module.location(found.condition.test),
            because=("the gradients of the remaining batches stay until the next epoch's first step", step.location),
        )


in_run = CHECK.judged_by(
    "checks.gradients.steps_run", "tails", "Step after the last batch as well: `or i + 1 == len(loader)`."
)
