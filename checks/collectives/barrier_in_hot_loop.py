"""The ranks wait for each other in every step, for nothing.

What it finds
    A barrier that every training step runs. As advice: a loss or metric that every step all-reduces only to log it.

Why it is bad
    DDP synchronises the ranks in backward already. A barrier more keeps the fastest rank from running ahead and makes
    the CPU wait for the GPU, so that kernels are no longer queued in advance; a reduction for the log costs a round of
    latency a step.

Example
    for batch in loader:
        model(batch).mean().backward()
        optimizer.step()
        dist.barrier()

Remedy
    Remove the barrier. Reduce what is logged when it is logged, every hundred steps, or sum it up on each rank and
    reduce it once an epoch.

When it is wrong
    Where the loop measures the time of single steps.

References
    https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.hot_loops import every_step
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP313",
    name="barrier-in-hot-loop",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"collectives", "forwards"}),
)
_REMEDY = "Remove it: DDP's backward makes the ranks meet in every step."


def in_source(script: Script) -> Iterator[Finding]:
    """Report barriers, and reductions for the log, in every training step."""
    for found in every_step(whole_projection(script)):
        event, backward = found.event, found.backward
        yield CHECK.finding(
            "source",
            f"every training step waits in {event.name}, though backward synchronises the ranks already"
            if found.is_barrier
            else f"every training step runs {event.name} for a number that is only looked at",
            remedy=_REMEDY
            if found.is_barrier
            else "Reduce it only in the steps that log it, or once an epoch.",
            locations=(event.module.location(event.node),),
            evidence=(
                Fact(
                    text="this backward runs in the same turn of the loop",
                    basis="source",
                    location=backward.module.location(backward.node),
                ),
            ),
            severity=None if found.is_barrier else Severity.ADVICE,
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report barriers that followed every training step, with their number."""
    from ddpdoctor.diagnosis.hot_barriers import hot_barriers
    from ddpdoctor.diagnosis.wording import count, place, site_location

    for hot in hot_barriers(record):
        location = site_location(hot.site)
        yield CHECK.finding(
            record.job.kind,
            f"every training step waits in {hot.kind} at {place(hot.site.innermost)}: {count(hot.calls, 'call')} in "
            f"{count(hot.steps, 'step')} of each rank, though backward synchronises the ranks already",
            remedy=_REMEDY,
            locations=() if location is None else (location,),
            evidence=(
                Fact(
                    text=f"each rank called it {hot.calls:,} times",
                    basis=record.job.kind,
                    numbers={"calls": hot.calls, "steps": hot.steps},
                    location=location,
                    stack=hot.site.frames,
                ),
            ),
        )
