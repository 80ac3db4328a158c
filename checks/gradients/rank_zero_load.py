"""Optimizer, scheduler or scaler state is loaded on rank 0 only.

What it finds
    `load_state_dict` of an optimizer, a learning-rate scheduler or a gradient scaler that only rank 0 reaches; and a
    scheduler that rank 0 alone steps.

Why it is bad
    DDP broadcasts rank 0's weights and buffers when it is built, never the optimizer's state. After a resume rank 0
    steps with its momentum and the others with none: equal gradients silently lead to different weights.

Example
    if rank == 0:
        model.load_state_dict(state["model"])           # DDP broadcasts this
        optimizer.load_state_dict(state["optimizer"])   # but not this

Remedy
    Load on every rank, with map_location set to the rank's own device.

When it is wrong
    Where the state is sent to the other ranks afterwards by a function that cannot be read.

References
    https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html#save-and-load-checkpoints
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, Script
from ddpdoctor.checks.gradients.autograd_grad_bypass import lonely_loads, lonely_steps
from ddpdoctor.checks.gradients.diverged_replicas import lone_changes
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.projection import whole_projection

CHECK = Check(
    code="DDP221",
    name="rank-zero-load",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=frozenset({"training_states"}),
    subjects=("job",),
    triggers=("load_state_dict", "lr_scheduler"),
)
_ON_EVERY_RANK = "Load it on every rank, with map_location set to the rank's own device."


def in_source(script: Script) -> Iterator[Finding]:
    """Report training state that the other ranks never get."""
    projection = whole_projection(script)
    told = {finding.locations[0] for finding in lone_changes(projection)}  # Of replicas that DDP keeps, as DDP208.
    steps = (verdict for verdict in lonely_steps(projection) if verdict.locations not in told)
    yield from CHECK.suspected((*lonely_loads(projection), *steps), _ON_EVERY_RANK)


in_run = CHECK.judged_by("checks.gradients.diverged_run", "loads", _ON_EVERY_RANK)
