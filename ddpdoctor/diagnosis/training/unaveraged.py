"""Steps on gradients that DDP did not average, proved by the gradients themselves, and why it did not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from ddpdoctor.diagnosis.divergence.unused_parameters import folded
from ddpdoctor.diagnosis.training.replicas import (
    ReplicaStep,
    averaged_by_hand,
    contributions,
    follows_a_cut,
    gradients_around_steps,
    judged_wraps,
    may_be_averaged_later,
)
from ddpdoctor.diagnosis.wording import rank_list, site_location
from ddpdoctor.finding import Basis, Fact, Frame, Location
from ddpdoctor.record.model import RunRecord, Wrap
from ddpdoctor.record.streams.training import Backward, OptimizerStep

Why = Literal["no-sync", "bypass", "again", "twice", "autograd-grad", "unlisted", "unknown"]
"""The forward ran under ``no_sync``; no forward through DDP led to the backward; the backward was a further one after
the reduction; gradients came again in the same backward; they are values of ``torch.autograd.grad``; DDP did not list
these parameters; or none of these."""


class Unaveraged(msgspec.Struct, frozen=True, kw_only=True):
    """The first step of an optimizer on gradients that differ between the ranks for one reason."""

    why: Why
    wrap: int
    model: str
    """Class of the wrapped module."""
    ranks: tuple[int, ...]
    step: int
    """n-th step of the optimizer."""
    steps_affected: int
    steps_compared: int
    unequal: int
    """Parameters whose gradients differ."""
    compared: int
    names: tuple[str, ...]
    """Folded names of them."""
    site: int
    """Call chain of what made the gradients: a backward, or a call of ``torch.autograd.grad``; else the step's."""
    location: Location | None
    frames: tuple[Frame, ...]
    step_location: Location | None
    wrap_location: Location | None
    ever_synchronised: bool
    """At least one training forward of the wrap let DDP reduce."""

    def facts(self, basis: Basis) -> tuple[Fact, ...]:
        """Return the numbers that prove it, the step that uses the gradients, and the wrap."""
        numbers = {
            "parameters": self.unequal,
            "compared": self.compared,
            "step": self.step,
            "steps_affected": self.steps_affected,
            "steps_compared": self.steps_compared,
        }
        differ = (
            f"in {self.steps_affected} of {self.steps_compared} steps the gradients differ between "
            f"{rank_list(self.ranks)}, first in step {self.step}: {self.unequal:,} of {self.compared:,} parameters "
            f"of {self.model} ({', '.join(self.names)})"
        )
        return (
            Fact(text=differ, basis=basis, numbers=numbers, location=self.location, stack=self.frames),
            Fact(text="this step uses them", basis=basis, location=self.step_location),
            Fact(text="the model is wrapped here", basis=basis, location=self.wrap_location),
        )


def unaveraged(record: RunRecord) -> Iterator[Unaveraged]:
    """Yield, for each wrap and reason, the first step whose gradients differ between the ranks.

    What a hook of the user reduces is left to the hook, what a step uses because the rehearsal cut a pass before it is
    no evidence, and where gradients were averaged by hand they do not differ. Models that never synchronise may be
    averaged at intervals: not judged while a call that could do so was not reached.
    """
    for wraps in judged_wraps(record):
        number, ranks = wraps[min(wraps)].wrap, tuple(wraps)
        steps = list(gradients_around_steps(record, number, ranks))
        by_reason: dict[tuple[Why, int], list[ReplicaStep]] = {}
        for step in steps:
            for why, site, unequal in _reasons(record, step, wraps):
                by_reason.setdefault((why, site), []).append(msgspec.structs.replace(step, unequal=unequal))
        for (why, site), affected in by_reason.items():
            found = _described(record, wraps, why, site, affected, len(steps))
            if why != "no-sync" or found.ever_synchronised or not may_be_averaged_later(record):
                yield found


def _reasons(
    record: RunRecord, step: ReplicaStep, wraps: Mapping[int, Wrap]
) -> Iterator[tuple[Why, int, tuple[str, ...]]]:
    wrap = wraps[min(wraps)]
    unlisted = {name for change in record.wrap_changes if change.wrap == step.wrap for name in change.added}
    late = tuple(name for name in step.unequal if name in unlisted)
    rest = tuple(name for name in step.unequal if name not in unlisted and name not in wrap.ignored)
    if late:
        yield "unlisted", step.steps[min(wraps)].site, late
    if rest:
        reason = next(filter(None, (_reason(record, step, rank) for rank in sorted(wraps))), None)
        if reason is not None:
            yield (*reason, rest)


def _reason(record: RunRecord, step: ReplicaStep, rank: int) -> tuple[Why, int] | None:
    """Why a rank's gradients were not averaged; None where the rehearsal is the reason."""
    own = step.steps[rank]
    used = contributions(record, own, step.wrap)
    if used and follows_a_cut(record, own, used[-1].time_ns):
        return None
    late: list[Backward] = []
    for backward in used:
        late = [] if step.wrap in backward.synchronised else [*late, backward]
    if late:
        why = next(entry.why for entry in late[-1].unreduced if entry.wrap == step.wrap)
        local = why == "no-sync" and averaged_by_hand(record, rank, own.elements)
        return None if local else (why, late[-1].site)
    before_ns = max((entry.time_ns for entry in record.optimizer_steps if _earlier(entry, own, rank)), default=0)
    for taken in record.gradients_taken:
        if taken.rank == rank and step.wrap in taken.wraps and before_ns < taken.time_ns < own.time_ns:
            return "autograd-grad", taken.site
    return "unknown", own.site


def _earlier(entry: OptimizerStep, own: OptimizerStep, rank: int) -> bool:
    return entry.rank == rank and entry.optimizer == own.optimizer and entry.ordinal < own.ordinal


def _described(
    record: RunRecord, wraps: Mapping[int, Wrap], why: Why, site: int, affected: list[ReplicaStep], compared: int
) -> Unaveraged:
    first, rank = affected[0], min(wraps)
    return Unaveraged(
        why=why,
        wrap=first.wrap,
        model=wraps[rank].module_class or "the model",
        ranks=tuple(wraps),
        step=first.ordinal,
        steps_affected=len(affected),
        steps_compared=compared,
        unequal=len(first.unequal),
        compared=first.compared,
        names=folded(first.unequal),
        site=site,
        location=site_location(record.site(site)),
        frames=record.site(site).frames,
        step_location=site_location(record.site(first.steps[rank].site)),
        wrap_location=site_location(record.site(wraps[rank].site)),
        ever_synchronised=any(entry.wrap == first.wrap and entry.synchronised for entry in record.forwards),
    )
