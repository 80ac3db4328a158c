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
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.wrapped_models import misplaced_optimizers
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.checks.gradients.wraps_run import Unheld
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP206",
    name="optimizer-misplaced",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=frozenset({"unheld_parameters"}),
    subjects=("training",),
    triggers=("optim",),
)
_AFTER_CHANGE = "Build the optimizer after the last change of the model."
_AFTER_SHARDING = "Build the optimizer after the model is sharded, which replaces its parameters."


def in_source(script: Script) -> Iterator[Finding]:
    """Report optimizers that forget their state, or do not hold what is trained."""
    for misplaced in misplaced_optimizers(whole_projection(script)):
        optimizer, cause = misplaced.optimizer, misplaced.cause
        name = optimizer.name.rpartition(".")[2]
        yield CHECK.finding(
            "source",
            f"this {name} holds the parameters from before the model was sharded, which replaces them"
            if misplaced.sharded
            else f"this {name} holds the parameters from before one of the model's layers was replaced"
            if misplaced.replaced
            else f"a new {name} is created for every step, so its state is lost each time",
            remedy=_AFTER_SHARDING
            if misplaced.sharded
            else _AFTER_CHANGE
            if misplaced.replaced
            else "Build the optimizer once, before the loop.",
            locations=optimizer.location,
            because=(
                (
                    "it is sharded here"
                    if misplaced.sharded
                    else "the new layer, which it does not hold"
                    if misplaced.replaced
                    else "its only step",
                    cause.location,
                ),
            ),
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report what has gradients, came after the optimizer of its model, and is never stepped."""
    from ddpdoctor.checks.gradients.wraps_run import unheld_parameters

    basis = record.job.kind
    for found in unheld_parameters(record):
        are = "parameter of {} is" if found.count == 1 else "parameters of {} are"
        yield CHECK.finding(
            basis,
            f"{found.count:,} {are.format(found.model)} in no optimizer and never trained: this {found.optimizer_type} "
            f"was built before {'it was' if found.count == 1 else 'they were'} there: {', '.join(found.names)}",
            remedy=_AFTER_SHARDING
            if found.sharded
            else f"{_AFTER_CHANGE} Or add the new parameters with add_param_group.",
            locations=(found.optimizer_location, found.wrap_location),
            ranks=found.ranks,
            because=((_unchanged(found), None, {"parameters": found.count, "steps": found.steps}),),
            evidence=(
                *(
                    (Fact(text=_held_in_vain(found), basis=basis, numbers={"parameters": found.strangers}),)
                    if found.strangers
                    else ()
                ),
                Fact(
                    text=f"the {found.optimizer_type} is built here",
                    basis=basis,
                    location=found.optimizer_location,
                    stack=found.chain,
                ),
                Fact(
                    text="the sharded model runs here" if found.sharded else "the model is wrapped here",
                    basis=basis,
                    location=found.wrap_location,
                ),
            ),
        )


def _unchanged(found: Unheld) -> str:
    have = "it has a gradient" if found.count == 1 else "they have gradients"
    return f"{have} before each of {found.steps} steps ({found.elements:,} elements), and no step changes them"


def _held_in_vain(found: Unheld) -> str:
    parameters = "1 parameter" if found.strangers == 1 else f"{found.strangers:,} parameters"
    kind = "sharded" if found.sharded else "wrapped"
    return f"the {found.optimizer_type} holds {parameters} that no {kind} module has and that never get a gradient"
