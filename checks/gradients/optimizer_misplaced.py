"""The optimizer is made in the wrong place.

What it finds
    An optimizer that is constructed in the loop in which it steps, or one whose model is given a new layer after it was
    built.

Why it is bad
    A new optimizer has no momentum and no step count: Adam becomes a noisy sign descent, and a scheduler bound to the
    first one does nothing. A layer set later is not among the parameters that an optimizer holds: it is never trained.

Example
    for batch in loader:
        optimizer = torch.optim.Adam(model.parameters())
        model(batch).mean().backward()
        optimizer.step()

Remedy
    Build the optimizer once, before the loop and after the last change of the model.

When it is wrong
    Where the state is meant to be forgotten in every step.

References
    https://docs.pytorch.org/docs/stable/optim.html#constructing-it
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Severity
from ddpdoctor.source.optimizers import misplaced_optimizers
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script import Script

CHECK = Check(code="DDP206", name="optimizer-misplaced", severity={"source": Severity.ERROR})


def in_source(script: Script) -> Iterator[Finding]:
    """Report optimizers that forget their state, or do not hold what is trained."""
    for misplaced in misplaced_optimizers(whole_projection(script)):
        optimizer, cause = misplaced.optimizer, misplaced.cause
        name = optimizer.name.rpartition(".")[2]
        yield CHECK.finding(
            "source",
            f"this {name} holds the parameters that the model had before a layer of it was replaced"
            if misplaced.replaced
            else f"a new {name} is made for every step, so its state is lost each time",
            remedy="Build the optimizer after the last change of the model."
            if misplaced.replaced
            else "Build the optimizer once, before the loop.",
            locations=(optimizer.module.location(optimizer.node),),
            evidence=(
                Fact(
                    text="the new layer, of which it knows nothing" if misplaced.replaced else "its only step",
                    basis="source",
                    location=cause.module.location(cause.node),
                ),
            ),
        )
