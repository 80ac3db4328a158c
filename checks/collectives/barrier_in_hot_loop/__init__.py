"""The ranks wait for each other in every step without need.

What it finds
    A barrier that every training step runs; in a live run it is advice as long as it takes less than 1 % of the step,
    not counting the wait for the last rank. As advice: a loss or metric that every step all-reduces only to log it.
    Only the source shows what a sum is for; a rehearsal counts how often it runs, and refutes the finding where that is
    rare.

Why it is bad
    Backward already synchronises the ranks. An additional barrier keeps the fastest rank from running ahead and makes
    the CPU wait for the GPU, so that kernels are no longer queued in advance; a reduction for the log costs a round of
    latency per step.

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

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from ddpdoctor.check import Check
from ddpdoctor.checks.collectives.barrier_in_hot_loop.source import every_step
from ddpdoctor.finding import Fact, Finding, FoundInRun, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord, Site

CHECK = Check(
    code="DDP313",
    name="barrier-in-hot-loop",
    stands_for="hot-barrier",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"backwards", "collectives", "forwards"}),
    needs_live=frozenset({"step_tracks", "call_tracks"}),
    advice_in_run=True,
    subjects=("collectives", "training"),
    triggers=("barrier", "wait_for_everyone", "reduce"),
)
_REMEDY = "Remove it: DDP's backward synchronises the ranks in every step."

_REDUCE_RARELY = (
    "The line reduces a number, and the barrier comes with it: reduce it once an epoch, as "
    "self.log(..., on_step=False, on_epoch=True, sync_dist=True) does, or only in steps that log it."
)


def _remedy(meeting: str) -> str:
    return _REMEDY if meeting == "backward" else f"Remove it: {meeting} makes the ranks meet in every step."


def in_source(script: Script) -> Iterator[Finding]:
    """Report barriers, and reductions for the log, in every training step."""
    for found in every_step(whole_projection(script)):
        event, beside = found.event, found.backward.module.location(found.backward.node)
        yield CHECK.finding(
            "source",
            f"every training step waits in {event.name}, though {found.meeting} synchronises the ranks already"
            if found.is_barrier
            else f"every training step runs {event.name} for a number that is only displayed",
            remedy=_remedy(found.meeting)
            if found.is_barrier
            else "Reduce it only in steps that log it, or once per epoch.",
            locations=(event.module.location(event.node),),
            evidence=(Fact(text="this backward runs in the same iteration", basis="source", location=beside),),
            severity=None if found.is_barrier else Severity.ADVICE,
        )


def in_run(record: RunRecord) -> Iterator[FoundInRun]:
    """Report barriers that followed every training step, with what they cost where that is known; count reductions."""
    if record.job.kind == "run":
        yield from _in_live_run(record)
        return
    from ddpdoctor.checks.collectives.barrier_in_hot_loop.run import counted_reductions, hot_barriers
    from ddpdoctor.diagnosis.wording import count, place

    for hot in hot_barriers(record):
        told = f"{place(hot.site.innermost)}: {count(hot.calls, 'call')} in {count(hot.steps, 'step')} of each rank"
        found = _finding(record, hot.kind, hot.site, f" at {told}", {"calls": hot.calls, "steps": hot.steps})
        mild = {"severity": Severity.ADVICE, "remedy": _REDUCE_RARELY} if hot.of_reduction else {}
        yield msgspec.structs.replace(found, **mild)
    yield from counted_reductions(record)


def _in_live_run(record: RunRecord) -> Iterator[Finding]:
    from ddpdoctor.checks.collectives.barrier_in_hot_loop.run import live_barriers
    from ddpdoctor.diagnosis.wording import milliseconds_text, place

    for hot in live_barriers(record):
        at = f" at {place(hot.site.innermost)}" if hot.site.frames else ""
        waiting = f", {milliseconds_text(hot.waiting_ns)} of it waiting for the last rank" if hot.waiting_ns else ""
        numbers = {"calls": hot.calls, "steps": hot.steps, "blocked_ns_per_step": hot.blocked_ns}
        found = _finding(record, hot.kind, hot.site, f"{at} ({milliseconds_text(hot.blocked_ns)}{waiting})", numbers)
        yield found if hot.costly else msgspec.structs.replace(found, severity=Severity.ADVICE)


def _finding(record: RunRecord, kind: str, site: Site, told: str, numbers: Mapping[str, int | float]) -> Finding:
    from ddpdoctor.diagnosis.wording import site_location

    location = site_location(site)
    return CHECK.finding(
        record.job.kind,
        f"every training step waits in {kind}{told}, although backward already synchronises the ranks",
        remedy=_REMEDY,
        locations=() if location is None else (location,),
        evidence=(
            Fact(
                text=f"each rank called it {numbers['calls']:,} times",
                basis=record.job.kind,
                numbers=numbers,
                location=location,
                stack=site.frames,
            ),
        ),
    )
