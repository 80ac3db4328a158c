"""Replicas whose parameters differ although their gradients were averaged, and jobs that train one model a rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from ddpdoctor.diagnosis.divergence.unused_parameters import folded
from ddpdoctor.diagnosis.performance.traffic import broadcasts_buffers
from ddpdoctor.diagnosis.training.replicas import (
    NO_WRAP,
    ReplicaStep,
    averaged_by_hand,
    contributions,
    gradients_around_steps,
    is_sharded,
    judged_wraps,
    may_be_averaged_later,
    parameters_around_steps,
    unaveraged,
)
from ddpdoctor.diagnosis.wording import site_location
from ddpdoctor.finding import Frame, Location
from ddpdoctor.record.model import RunRecord, Wrap
from ddpdoctor.record.streams.training import OptimizerStep, TrainingState

IN_PLACE = "fully_shard"
"""What shards in place, and leaves what it is not given as it is; other wrappers flatten all."""

# Training state that some ranks load and the others never get.


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """An object with training state that was loaded by some rank at least."""

    kind: Literal["optimizer", "scheduler", "scaler"]
    type: str
    loaded: tuple[int, ...]
    """Ranks that loaded it."""
    others: tuple[int, ...]
    """Ranks that have one as well and did not."""
    differs: bool
    """What it held at the first step on the ranks that loaded it is not what it held on the others; of a late load that
    the parameters parted later."""
    late: bool
    """It was loaded after the first step."""
    wraps: tuple[int, ...]
    """Wraps whose parameters it steers; empty when that is not known."""
    location: Location | None
    frames: tuple[Frame, ...]


def loads(record: RunRecord) -> tuple[Load, ...]:
    """Return what was loaded before or after the first step, one entry for each object that all ranks have.

    A late load is left out where nothing shows what came of it.
    """
    by_object: dict[tuple[str, int], list[TrainingState]] = {}
    for state in record.training_states:
        by_object.setdefault((state.kind, state.number), []).append(state)
    found = []
    for _, states in sorted(by_object.items()):
        holders = {state.rank for state in states}
        with_load = [state for state in states if state.loads or state.late_loads]
        if holders != set(record.rank_numbers()) or len({state.type for state in states}) > 1 or not with_load:
            continue
        late = not any(state.loads for state in with_load)
        digests = {state.digest for state in with_load}
        differs = any(state.digest not in digests for state in states)
        if late:
            differs = len(with_load) < len(states) and _parted_later(record, with_load[0].wraps)
        if late and not differs:
            continue
        site = record.site((with_load[0].loads + with_load[0].late_loads)[0])
        found.append(
            Load(
                kind=states[0].kind,
                type=states[0].type,
                loaded=tuple(sorted(state.rank for state in with_load)),
                others=tuple(sorted(holders - {state.rank for state in with_load})),
                differs=differs,
                late=late,
                wraps=with_load[0].wraps,
                location=site_location(site),
                frames=site.frames,
            )
        )
    return tuple(found)


def lone_loads(record: RunRecord) -> tuple[Load, ...]:
    """Return the loads that left the ranks with different states."""
    return tuple(load for load in loads(record) if load.others and load.differs)


def _parted_later(record: RunRecord, wraps: tuple[int, ...]) -> bool:
    """Return whether parameters that were equal after the first step differ after a later one, on averaged
    gradients.
    """
    unaveraged_wraps = {reason.wrap for reason in unaveraged(record)}
    for members in judged_wraps(record):
        wrap, ranks = members[min(members)].wrap, tuple(members)
        if wrap not in wraps or wrap in unaveraged_wraps:
            continue
        unequal = {step.ordinal: bool(step.unequal) for step in parameters_around_steps(record, wrap, ranks)}
        if unequal.get(1) is False and any(unequal.values()):
            return True
    return False


Cause = Literal["after-the-wrap", "own-state", "own-step", "learning-rates", "gradients", "unknown"]
"""They differed before the first step; they want no gradient; the learning rates differ; the gradients of a
synchronised backward differ; or none of these."""


class Diverged(msgspec.Struct, frozen=True, kw_only=True):
    """The first moment at which the parameters of one wrap differ between the ranks."""

    cause: Cause
    model: str
    ranks: tuple[int, ...]
    step: int
    """n-th step of the optimizer; 0 before the first."""
    unequal: int
    compared: int
    names: tuple[str, ...]
    """Folded names of the parameters that differ."""
    first_name: str
    learning_rates: tuple[tuple[float, ...], ...]
    """Of the step, by rank; empty before the first."""
    location: Location | None
    """The step, or the wrap for the moment before the first."""
    wrap_location: Location | None


class OwnBuffers(msgspec.Struct, frozen=True, kw_only=True):
    """Buffers of one wrap that its ranks change apart, and that DDP does not hand on."""

    model: str
    ranks: tuple[int, ...]
    forward: int
    """The first training forward before which they differ, from 1."""
    unequal: int
    compared: int
    names: tuple[str, ...]
    """Folded names of the buffers that differ."""
    location: Location | None
    """The wrap."""


class Independent(msgspec.Struct, frozen=True, kw_only=True):
    """An optimizer whose ranks train models of their own."""

    ranks: tuple[int, ...]
    steps: int
    """Steps compared; the gradients differ in every one."""
    unequal: int
    compared: int
    names: tuple[str, ...]
    """Of those that differ: their places in the optimizer, and their shapes."""
    beside: Literal["", "wrapped", "sharded"]
    """These parameters are in no module that DDP wraps, or that is sharded; empty where the script has none at all."""
    backward_location: Location | None
    step_location: Location | None
    loader_location: Location | None


def diverged_replicas(record: RunRecord) -> Iterator[Diverged]:
    """Yield the wraps whose parameters differ between the ranks, where nothing more specific is the reason.

    More specific are collectives that were paired wrongly, gradients that DDP did not average, and a state that was
    loaded on some ranks only. Parameters that DDP ignores, wraps with a communication hook, steps without a
    synchronised backward and models that are averaged by hand are left out.
    """
    lone = lone_loads(record)
    explained: dict[int, int] = {}
    for reason in unaveraged(record):
        if reason.why != "unknown":
            explained[reason.wrap] = min(reason.step, explained.get(reason.wrap, reason.step))
    for wraps in judged_wraps(record):
        wrap, ranks = wraps[min(wraps)], tuple(wraps)
        if any(not load.wraps or wrap.wrap in load.wraps for load in lone):
            continue
        first = next(filter(None, (_of_interest(record, s, wraps) for s in _moments(record, wrap.wrap, ranks))), None)
        if first is not None and first.ordinal < explained.get(wrap.wrap, first.ordinal + 1):
            yield _described(record, first, wraps)


_OF_NORMS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
"""Statistics of torch's norms, which a training forward does not use: a check of their own is about them."""


def own_buffers(record: RunRecord) -> Iterator[OwnBuffers]:
    """Yield the wraps whose buffers differ between the ranks to the last forward seen, as DDP broadcasts none."""
    for wraps in judged_wraps(record):
        wrap, ranks = wraps[min(wraps)], tuple(wraps)
        if any(broadcasts_buffers(one) for one in wraps.values()):
            continue
        norms = wrap.batch_norms or wrap.synchronised_batch_norms
        held = [buffer.name for buffer in wrap.buffers if buffer.dtype.startswith(("float", "bfloat"))]
        held = [name for name in held if not norms or name.rpartition(".")[2] not in _OF_NORMS]
        by_forward: dict[int, list[Mapping[str, str]]] = {}
        for state in record.buffers:
            if state.wrap == wrap.wrap and state.rank in wraps:
                by_forward.setdefault(state.forward, []).append(state.digests)
        common = [(at, states) for at, states in sorted(by_forward.items()) if len(states) == len(ranks)]
        apart = [
            (at, [name for name in held if len({digests.get(name, "") for digests in states}) > 1])
            for at, states in common
        ]
        if len(apart) < 2 or not (names := apart[-1][1]):
            continue
        yield OwnBuffers(
            model=wrap.module_class or "the model",
            ranks=ranks,
            forward=next(at for at, found in apart if set(names) & set(found)) + 1,
            unequal=len(names),
            compared=len(held),
            names=folded(names),
            location=site_location(record.site(wrap.site)),
        )


def independent_models(record: RunRecord) -> Iterator[Independent]:
    """Yield the optimizers whose parameters are in no wrapped module and whose gradients differ in every step.

    Only where every rank draws its own part of the data, every rank makes the steps, no collective of the user moves as
    much as the model, and no call that could was left unreached. Besides such a module only parameters that began equal
    on all ranks count, and those that take the place of a wrapped model: others are meant to differ.
    """
    ranks = record.rank_numbers()
    sharding = [
        loader for loader in record.loaders if loader.sampler_shards and _trains(record, loader.rank, loader.loader)
    ]
    if len(ranks) < 2 or {loader.rank for loader in sharding} != set(ranks) or may_be_averaged_later(record):
        return
    in_place = bool(record.sharded_modules) and all(one.by == IN_PLACE for one in record.sharded_modules)
    if is_sharded(record) and not in_place:
        return  # What an optimizer holds are parts of parameters, which differ.
    begun = {step.optimizer: step for step in parameters_around_steps(record, NO_WRAP, ranks) if not step.ordinal}
    after = {(s.optimizer, s.ordinal): s for s in parameters_around_steps(record, NO_WRAP, ranks)}
    by_optimizer: dict[int, list[ReplicaStep]] = {}
    for step in gradients_around_steps(record, NO_WRAP, ranks):
        by_optimizer.setdefault(step.optimizer, []).append(step)
    for optimizer, steps in by_optimizer.items():
        first = steps[0]
        began_apart = optimizer not in begun or bool(begun[optimizer].unequal)
        beside = bool(record.wraps) or in_place
        meant = beside and began_apart and not _takes_the_place_of_a_wrap(record, first)
        parted = all(s.unequal and (a := after.get((optimizer, s.ordinal))) is not None and a.unequal for s in steps)
        elements = first.steps[min(ranks)].elements
        if not parted or meant or any(averaged_by_hand(record, rank, elements) for rank in ranks):
            continue
        step_ns = first.steps[ranks[0]].time_ns
        own = [b for b in record.backwards if b.rank == ranks[0] and b.time_ns < step_ns]
        before = [b for b in own if not b.wraps] or own
        yield Independent(
            ranks=ranks,
            steps=len(steps),
            unequal=len(first.unequal),
            compared=first.compared,
            names=folded(first.unequal),
            beside="sharded" if in_place else "wrapped" if record.wraps else "",
            backward_location=site_location(record.site(before[-1].site)) if before else None,
            step_location=site_location(record.site(first.steps[ranks[0]].site)),
            loader_location=site_location(record.site(sharding[0].site)),
        )


def _takes_the_place_of_a_wrap(record: RunRecord, step: ReplicaStep) -> bool:
    """Return whether the line of the backward before a step has reached a wrap before, of as many parameters."""
    rank = min(step.steps)
    own = [entry for entry in record.backwards if entry.rank == rank and entry.time_ns < step.steps[rank].time_ns]
    if not own:
        return False
    reached = {wrap for entry in own if entry.site == own[-1].site for wrap in entry.wraps}
    sizes = {
        (len(trained), sum(math.prod(tensor.shape) for tensor in trained))
        for wrap in record.wraps
        if wrap.rank == rank and wrap.wrap in reached
        if (trained := [tensor for tensor in wrap.parameters if tensor.requires_grad])
    }
    return (step.compared, step.steps[rank].elements) in sizes


def _trains(record: RunRecord, rank: int, loader: int) -> bool:
    return any(entry.rank == rank and entry.loader == loader and entry.backwards for entry in record.passes)


def _moments(record: RunRecord, wrap: int, ranks: tuple[int, ...]) -> Iterator[ReplicaStep]:
    yield from sorted(parameters_around_steps(record, wrap, ranks), key=lambda step: (step.ordinal, step.optimizer))


def _of_interest(record: RunRecord, moment: ReplicaStep, wraps: Mapping[int, Wrap]) -> ReplicaStep | None:
    """Return the moment with what must not differ in it; None when nothing does or when it need not be equal."""
    wrap = wraps[min(wraps)]
    trained = {tensor.name for tensor in wrap.parameters if tensor.requires_grad}
    differ = [name for name in moment.unequal if name not in wrap.ignored]
    # What DDP averages comes first: what the module changes itself may follow from it.
    unequal = tuple(name for name in differ if name in trained) or tuple(differ if moment.ordinal else ())
    for rank, step in moment.steps.items():
        used = contributions(record, step, moment.wrap)
        if not any(moment.wrap in backward.synchronised for backward in used):
            return None
        if averaged_by_hand(record, rank, step.elements):
            return None
    return msgspec.structs.replace(moment, unequal=unequal) if unequal else None


def _described(record: RunRecord, moment: ReplicaStep, wraps: Mapping[int, Wrap]) -> Diverged:
    rank = min(wraps)
    place = site_location(record.site(wraps[rank].site))
    rates = tuple(moment.steps[rank].learning_rates for rank in sorted(moment.steps))
    return Diverged(
        cause=_cause(record, moment, wraps, rates),
        model=wraps[rank].module_class or "the model",
        ranks=tuple(wraps),
        step=moment.ordinal,
        unequal=len(moment.unequal),
        compared=moment.compared,
        names=folded(moment.unequal),
        first_name=moment.unequal[0],
        learning_rates=rates,
        location=site_location(record.site(moment.steps[rank].site)) if moment.ordinal else place,
        wrap_location=place,
    )


def _is_within_forward(record: RunRecord, step: OptimizerStep) -> bool:
    """Return whether a module steps an optimizer in its own forward, before DDP averages anything of that step."""
    return any(frame.function.rpartition(".")[2] == "forward" for frame in record.site(step.site).frames)


def _cause(
    record: RunRecord, moment: ReplicaStep, wraps: Mapping[int, Wrap], rates: tuple[tuple[float, ...], ...]
) -> Cause:
    if not moment.ordinal:
        return "after-the-wrap"
    wrap = wraps[min(wraps)]
    if not any(tensor.requires_grad for tensor in wrap.parameters if tensor.name in moment.unequal):
        return "own-state"
    if any(_is_within_forward(record, step) for step in moment.steps.values()):
        return "own-step"
    for step in gradients_around_steps(record, moment.wrap, tuple(wraps)):
        if (step.optimizer, step.ordinal) == (moment.optimizer, moment.ordinal) and step.unequal:
            return "gradients"
    return "learning-rates" if len(set(rates)) > 1 else "unknown"
