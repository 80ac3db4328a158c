"""The optimizer is created in the wrong place.

What it finds
    An optimizer that is constructed in the loop in which it steps, or one whose model is given a new layer, or sharded,
    after it was built. In a run: parameters that came into the model after the optimizer was built, which had gradients
    before its steps, are in no optimizer, and stay as they were.

Why it is bad
    A new optimizer has no momentum and no step count: Adam becomes a noisy sign descent, and a scheduler bound to the
    first one does nothing. A layer set later is not among the parameters that an optimizer holds: it is never trained.
    Sharding puts new parameters in the place of all.

Example
    for batch in loader:
        optimizer = torch.optim.Adam(model.parameters())
        model(batch).mean().backward()
        optimizer.step()

Remedy
    Build the optimizer once, before the loop and after the last change of the model.

When it is wrong
    If the state should be reset in every step. A model of which only a part is trained on purpose, layers that are
    added by add_param_group, and optimizers built later for what came later are recognised in a run.

References
    https://docs.pytorch.org/docs/stable/optim.html#constructing-it
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.wrapped_models import misplaced_optimizers

CHECK = Check(
    code="DDP206",
    name="optimizer-misplaced",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=frozenset({"unheld_parameters"}),
    subjects=("training",),
    triggers=("optim",),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report optimizers that forget their state, or do not hold what is trained."""
    yield from CHECK.suspected(misplaced_optimizers(whole_projection(script)))


in_run = CHECK.judged_by("checks.gradients.steps_run", "unheld_parameters")
