"""Replicas whose parameters differ although their gradients were averaged, and jobs that train one model a rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set

import msgspec

from ddpdoctor.check import Verdict, Via
from ddpdoctor.checks.gradients.begin_apart_source import ALIKE_BEFORE
from ddpdoctor.checks.gradients.missing_ddp_wrap import BESIDE
from ddpdoctor.diagnosis.divergence.divergence import find_divergence
from ddpdoctor.diagnosis.divergence.unused_parameters import folded
from ddpdoctor.diagnosis.performance.traffic import broadcasts_buffers
from ddpdoctor.diagnosis.training.replicas import (
    NO_WRAP,
    SPOILS_GRADIENTS,
    ReplicaStep,
    around_steps,
    averaged_by_hand,
    common_and_unequal,
    contributions,
    differ,
    exchanges,
    is_sharded,
    judged_wraps,
    kept_by_hand,
    may_be_averaged_later,
    unaveraged,
)
from ddpdoctor.diagnosis.wording import rank_list, site_location, verb
from ddpdoctor.finding import Location, Severity, grouped
from ddpdoctor.record.model import RunRecord, Wrap
from ddpdoctor.record.streams.training import Loader, PlateauStep

IN_PLACE = "fully_shard"
"""What shards in place, and leaves what it is not given as it is; other wrappers flatten all."""

# Training state that some ranks load and the others never get.


def loads(record: RunRecord) -> Iterator[Verdict]:
    """Yield what was loaded before or after the first step, one verdict for each object that all ranks have.

    A late load is left out where nothing shows what came of it.
    """
    return (verdict for _, verdict in _loads(record))


def _loads(record: RunRecord) -> Iterator[tuple[tuple[int, ...], Verdict]]:
    """Yield the wraps whose parameters a loaded object steers, none where that is not known, and the verdict on it."""
    by_object = grouped(record.training_states, lambda state: (state.kind, state.number))
    for (kind, _), states in sorted(by_object.items()):
        holders = {state.rank for state in states}
        with_load = [state for state in states if state.loads or state.late_loads]
        if holders != set(record.rank_numbers()) or len({state.type for state in states}) > 1 or not with_load:
            continue
        late = not any(state.loads for state in with_load)
        digests = {state.digest for state in with_load}
        differs = any(state.digest not in digests for state in states)
        if late:
            # What it held later is not known: only that the parameters parted then.
            differs = len(with_load) < len(states) and _parted_later(record, with_load[0].wraps)
        if late and not differs:
            continue
        site = record.site((with_load[0].loads + with_load[0].late_loads)[0])
        place = site_location(site)
        loaded = tuple(sorted(state.rank for state in with_load))
        others = rank_list(holders.difference(loaded))
        if len(loaded) == len(holders) or not differs:
            told = f"all ranks hold the same state of this {kind} at the first step"
            yield with_load[0].wraps, Verdict(wrong=False, sentence=told, locations=place)
            continue
        who = rank_list(loaded)
        proof = "the parameters were the same on all ranks after the first optimizer step, and differ after a later one"
        if not late:
            held = f"at the first optimizer step the {states[0].type} of {others} holds a different state than that of"
            proof = f"{held} {who}"
        yield (
            with_load[0].wraps,
            Verdict(
                sentence=f"only {who} {verb(loaded, 'loads', 'load')} the state of this {kind}, and DDP does not "
                "broadcast it",
                locations=place,
                ranks=loaded,
                because=(proof, Via(place, site.frames)),
            ),
        )


def _parted_later(record: RunRecord, wraps: tuple[int, ...]) -> bool:
    """Return whether parameters that were equal after the first step differ later, on averaged gradients."""
    unaveraged_wraps = {reason.wrap for reason in unaveraged(record)}
    for members in judged_wraps(record):
        wrap, ranks = members[min(members)].wrap, tuple(members)
        if wrap not in wraps or wrap in unaveraged_wraps:
            continue
        steps = around_steps(record, record.parameter_digests, wrap, ranks)
        unequal = {step.ordinal: bool(step.unequal) for step in steps}
        if unequal.get(1) is False and any(unequal.values()):
            return True
    return False


_REMEDIES = {
    "after-the-wrap": "Change or load the parameters before the wrap, or in the same way on every rank.",
    "made-apart": (
        "Once the model is made, give all ranks rank 0's parameters: dist.broadcast(tensor, src=0) for each tensor of "
        "model.state_dict().values(). Or make it after the same seed on every rank, and seed by rank afterwards."
    ),
    "shards-apart": ALIKE_BEFORE,
    "learning-rates": "Give the optimizer the same learning rate on every rank.",
    "gradients": "Change gradients after backward (clipping, noise, skipped values) in the same way on every rank.",
    "own-state": (
        "Average over the ranks what it is changed by, with dist.all_reduce; or make it a buffer, which DDP hands on "
        "from rank 0 before each forward."
    ),
    "own-buffers": (
        "Average over the ranks what they are changed by, with dist.all_reduce. broadcast_buffers=True makes them "
        "alike, but of rank 0's batches only. A cache of a rank's own batch may differ: do not register it as a buffer."
    ),
    "lost-buffers": "Average over the ranks what they are changed by, with dist.all_reduce.",
    "own-step": (
        "Average the gradients before this step, with dist.all_reduce and a division by the number of ranks, or step "
        "after DDP's backward."
    ),
    "written": (
        "What changes parameters beside the optimizer (an average of the weights that is copied back, a clamp) has to "
        "do the same on every rank, or broadcast them afterwards: dist.broadcast(parameter.data, src=0)."
    ),
    "unknown": "Look for code that sets parameters or optimizer state on some ranks only.",
    "no-wrap": "Wrap the model in DistributedDataParallel after it is on its device and before the training loop.",
    "wrapped": BESIDE,
    "sharded": "Call fully_shard on the whole model as well, after its layers: what is in no unit is not reduced.",
    "ignored": "Take them out of what is ignored, or average their gradients by dist.all_reduce in each step.",
    "hybrid": "Give the mesh a shard dimension of two ranks or more; for whole replicas use DistributedDataParallel.",
    "mesh": "Give it the mesh with both dimensions, that of the replicas and that of the shards.",
    "group": "Give it a group of all ranks that train this model; with none it takes the whole job.",
}
_REASONS = {
    "own-state": "they want no gradient, and the module changes them itself: DDP averages nothing of them",
    "own-step": "the module steps this optimizer in its forward, with gradients of this rank's batch: DDP averages "
    "later",
    "gradients": "DDP averaged the gradients, and before the step they differ again: something changed them since",
    "unknown": "the gradients that the step used are the same on all ranks",
}
"""Why parameters differ: they want no gradient; they are stepped in a forward; the gradients of a synchronised backward
differ; or none of what is looked at. Different learning rates are told with their values."""


def diverged_replicas(record: RunRecord) -> Iterator[Verdict]:
    """Yield the wraps whose parameters differ between the ranks, where nothing more specific is the reason.

    More specific are collectives that were paired wrongly, gradients that DDP did not average, and a state that was
    loaded on some ranks only. Parameters that DDP ignores, wraps with a communication hook, steps without a
    synchronised backward and models that are averaged by hand are left out.
    """
    lone = [wraps for wraps, verdict in _loads(record) if verdict.wrong]
    explained: dict[int, int] = {}
    for reason in unaveraged(record):
        if reason.why != "unknown":
            explained[reason.wrap] = min(reason.step, explained.get(reason.wrap, reason.step))
    for wraps in judged_wraps(record):
        wrap, ranks = wraps[min(wraps)], tuple(wraps)
        if any(not loaded or wrap.wrap in loaded for loaded in lone):
            continue
        steps = around_steps(record, record.parameter_digests, wrap.wrap, ranks)
        moments = sorted(steps, key=lambda step: (step.ordinal, step.optimizer))
        first = next(filter(None, (_of_interest(record, moment, wraps) for moment in moments)), None)
        if first is not None and first.ordinal < explained.get(wrap.wrap, first.ordinal + 1):
            yield _described(record, first, wraps)


def _writes(record: RunRecord, wrap: int, names: Sequence[str]) -> tuple[tuple[str, Location | None], ...]:
    """Return the lines that change the first of these tensors."""
    own = [one for one in record.own_writes if one.wrap == wrap and one.name in names]
    places = dict.fromkeys(site_location(record.site(one.site)) for one in own if one.name == own[0].name)
    return tuple((f"{own[0].name} is changed here", place) for place in places)


_OF_NORMS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
"""Statistics of torch's norms, which a training forward does not use: a check of their own is about them."""


def own_buffers(record: RunRecord) -> Iterator[Verdict]:
    """Yield the wraps whose buffers differ between the ranks to the last forward seen: DDP broadcasts none, or rank 0's
    over what the others have made of theirs.
    """
    for wraps in judged_wraps(record):
        wrap, ranks = wraps[min(wraps)], tuple(wraps)
        is_sent = any(broadcasts_buffers(one) for one in wraps.values())
        fate = f"then replaces them by those of rank {min(ranks)}: what the others changed is lost"
        norms = wrap.batch_norms or wrap.synchronised_batch_norms
        held = [buffer.name for buffer in wrap.buffers if buffer.dtype.startswith(("float", "bfloat"))]
        held = [name for name in held if not norms or name.rpartition(".")[2] not in _OF_NORMS]
        states = (state for state in record.buffers if state.wrap == wrap.wrap and state.rank in wraps)
        apart = [
            (at, [name for name in held if len({state.digests.get(name, "") for state in found}) > 1])
            for at, found in sorted(grouped(states, lambda state: state.forward).items())
            if len(found) == len(ranks)
        ]
        if len(apart) < 2 or not (names := apart[-1][1]):
            continue
        place, shown = site_location(record.site(wrap.site)), folded(names)
        forward = next(at for at, found in apart if set(names) & set(found)) + 1
        numbers = {"buffers": len(names), "compared": len(held), "forward": forward}
        yield Verdict(
            sentence=f"buffers of {wrap.module_class or 'the model'} differ between {rank_list(ranks)} before forward "
            f"{forward}, {shown[0]} first: each rank changes its own, and DDP {fate if is_sent else 'broadcasts none'}",
            remedy=_REMEDIES["lost-buffers" if is_sent else "own-buffers"],
            locations=place,
            ranks=ranks,
            severity=Severity.ADVICE if is_sent else Severity.WARNING,  # So it is with every BatchNorm.
            because=(
                (f"{len(names):,} of {len(held):,} buffers differ: {', '.join(shown)}", None, numbers),
                *_writes(record, wrap.wrap, names),
                (f"broadcast_buffers is {'on' if is_sent else 'off'} in this wrap", place),
            ),
        )


PLATEAU_THRESHOLD = 1e-4
"""Of the value: what torch's scheduler takes for no change where it is told nothing else."""


def plateaus_apart(record: RunRecord, sentence: str, remedy: str) -> Iterator[Verdict]:
    """Yield the lines at which ranks give the same scheduler values that its threshold (1e-4 of them) tells apart."""
    values: dict[tuple[int, int], list[PlateauStep]] = {}
    turns = Counter[tuple[int, int]]()
    for step in sorted(record.plateau_steps, key=lambda step: step.rank):
        turns[step.rank, step.number] += 1
        values.setdefault((turns[step.rank, step.number], step.number), []).append(step)
    seen: set[Location | None] = set()
    for (turn, _), steps in sorted(values.items()):
        given = [step.value for step in steps]
        place = site_location(record.site(steps[0].site))
        if max(given) - min(given) <= PLATEAU_THRESHOLD * max(map(abs, given)) or place in seen:
            continue
        seen.add(place)
        shown = ", ".join(f"{step.value:.4g} on rank {step.rank}" for step in steps[:4])
        yield Verdict(
            sentence=sentence,
            remedy=remedy,
            locations=place,
            ranks=tuple(step.rank for step in steps),
            severity=Severity.WARNING,
            because=(f"the scheduler was given {shown} in its step {turn}", place),
        )


def independent_models(record: RunRecord) -> Iterator[Verdict]:
    """Yield the optimizers whose parameters are in no wrapped module and whose gradients differ in every step.

    Only where every rank draws its own part of the data, or one backward goes through a DDP model as well; every rank
    makes the steps, no collective of the user moves as much as the model, and no call that could was left unreached.
    Besides such a module only parameters that began equal on all ranks count, and those in the place of a wrapped
    model: others are meant to differ.
    """
    yield from shards_apart(record)
    ranks = record.rank_numbers()
    sharding = _sharding(record)
    if len(ranks) < 2 or may_be_averaged_later(record):
        return
    divided = {loader.rank for loader in sharding} == set(ranks)
    if not divided and (not record.wraps or is_sharded(record) or exchanges(record)):
        return
    in_place = bool(record.sharded_modules) and all(one.by == IN_PLACE for one in record.sharded_modules)
    ignored = {name for one in record.sharded_modules for name in one.ignored}
    if (is_sharded(record) and not (in_place or ignored)) or (ignored and exchanges(record)):
        return  # What an optimizer holds are parts of parameters, which differ.
    only = ignored if is_sharded(record) and not in_place else None
    parameters = [_narrowed(step, only) for step in around_steps(record, record.parameter_digests, NO_WRAP, ranks)]
    begun = {step.optimizer: step for step in parameters if not step.ordinal}
    after = {(step.optimizer, step.ordinal): step for step in parameters}
    moments = (_narrowed(step, only) for step in around_steps(record, record.gradient_digests, NO_WRAP, ranks))
    for optimizer, steps in grouped(moments, lambda step: step.optimizer).items():
        first = steps[0]
        began_apart = optimizer not in begun or bool(begun[optimizer].unequal)
        beside = bool(record.wraps or record.sharded_modules)
        meant = beside and began_apart and not _takes_the_place_of_a_wrap(record, first)
        if divided and not beside and all(s.compared and not s.unequal for s in steps):
            yield from _averaged(record, optimizer, steps)
        parted = all(s.unequal and (a := after.get((optimizer, s.ordinal))) is not None and a.unequal for s in steps)
        elements = first.steps[min(ranks)].elements
        if not parted or meant or any(averaged_by_hand(record, rank, elements) for rank in ranks):
            continue
        step_ns = first.steps[ranks[0]].time_ns
        own = [b for b in record.backwards if b.rank == ranks[0] and b.time_ns < step_ns]
        if not divided and not (own and own[-1].wraps):
            continue
        before = [b for b in own if divided and not b.wraps] or own
        unequal, form = len(first.unequal), "sharded" if in_place else "wrapped" if record.wraps else "no-wrap"
        are = "parameter of the optimizer is" if unequal == 1 else "parameters of the optimizer are"
        by = "in no module that is sharded" if in_place else "in no module that DistributedDataParallel wraps"
        if ignored.issuperset(first.unequal):
            form, by = "ignored", "in a sharded module, and ignored there"
        kept = f"{unequal:,} {are} {by}: gradients stay on their rank"
        if form == "no-wrap":
            why = "the model is not wrapped in DistributedDataParallel"
            kept = f"the gradients of this backward stay on their rank: {why}"
        yield Verdict(
            sentence=f"{kept}, and {rank_list(ranks)} train different models",
            remedy=_REMEDIES[form],
            locations=site_location(record.site(before[-1].site)) if before else None,
            because=(
                (
                    f"before each of {len(steps)} steps the gradients of {unequal:,} of {first.compared:,} parameters "
                    f"differ between ranks, and so do the parameters after it: {', '.join(folded(first.unequal))}",
                    None,
                    {"steps": len(steps), "parameters": unequal, "compared": first.compared},
                ),
                ("this step uses them", site_location(record.site(first.steps[ranks[0]].site))),
                ("this loader gives every rank its own part of the data", site_location(record.site(sharding[0].site)))
                if divided
                else ("this backward goes through a DDP model, whose gradients are averaged", None),
            ),
        )


def _averaged(record: RunRecord, optimizer: int, steps: Sequence[ReplicaStep]) -> Iterator[Verdict]:
    """Clear the backwards whose gradients collectives of the user have made the same on all ranks before each step."""
    kept = [one for one in record.gradient_digests if one.wrap == NO_WRAP and one.optimizer == optimizer]
    moments = {tuple(sorted(one.digests.items())) for one in kept}
    elements = next(iter(steps[0].steps.values())).elements
    if len(moments) < 2 or not all(averaged_by_hand(record, rank, elements) for rank in steps[0].steps):
        return
    last_ns = {rank: step.time_ns for rank, step in steps[-1].steps.items()}
    sites = {one.site for one in record.backwards if not one.wraps and one.time_ns < last_ns.get(one.rank, 0)}
    yield Verdict(
        wrong=False,
        sentence=f"before each of {len(steps)} steps all ranks had the same gradients, which collectives of the script "
        "had reduced",
        locations=tuple(site_location(record.site(site)) for site in sites),
    )


def _narrowed(step: ReplicaStep, only: Set[str] | None) -> ReplicaStep:
    """Return a step with those of what differs in it that are asked for; all where nothing is."""
    kept = step.unequal if only is None else tuple(name for name in step.unequal if name in only)
    return msgspec.structs.replace(step, unequal=kept, compared=step.compared if only is None else len(only))


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


def _sharding(record: RunRecord) -> list[Loader]:
    """Return the loaders that give each rank its own part of the data, and that are trained on."""
    trained = {(entry.rank, entry.loader) for entry in record.passes if entry.backwards}
    return [one for one in record.loaders if one.sampler_shards and (one.rank, one.loader) in trained]


def _of_interest(record: RunRecord, moment: ReplicaStep, wraps: Mapping[int, Wrap]) -> ReplicaStep | None:
    """Return the moment with what must not differ in it; None when nothing does or when it need not be equal."""
    wrap = wraps[min(wraps)]
    trained = {tensor.name for tensor in wrap.parameters if tensor.requires_grad}
    # What was unfrozen after the wrap DDP does not average, of which a check of its own speaks.
    added = {name for change in record.wrap_changes if change.wrap == moment.wrap for name in change.added}
    differ = [name for name in moment.unequal if name not in wrap.ignored and name not in added]
    # What DDP averages comes first: what the module changes itself may follow from it.
    unequal = tuple(name for name in differ if name in trained) or tuple(differ if moment.ordinal else ())
    for rank, step in moment.steps.items():
        used = contributions(record, step, moment.wrap)
        if not any(moment.wrap in backward.synchronised for backward in used):
            return None
        if averaged_by_hand(record, rank, step.elements):
            return None
    return msgspec.structs.replace(moment, unequal=unequal) if unequal else None


def _described(record: RunRecord, moment: ReplicaStep, wraps: Mapping[int, Wrap]) -> Verdict:
    rank, ranks, names = min(wraps), tuple(wraps), folded(moment.unequal)
    place = site_location(record.site(wraps[rank].site))
    stepped = site_location(record.site(moment.steps[rank].site)) if moment.ordinal else place
    cause = _cause(record, moment, wraps)
    reason = _REASONS.get(cause, "")
    if cause == "learning-rates":
        rates = (f"rank {rank}: {moment.steps[rank].learning_rates}" for rank in ranks)
        reason = f"the learning rates differ ({'; '.join(rates)})"
    if cause == "written":
        writers = _writers(record, moment)
        reason = (
            f"between steps {moment.ordinal - 1} and {moment.ordinal} the parameters change on {rank_list(writers)}"
            f"{'' if set(writers) == set(ranks) else ' only'}, and no optimizer does it: the gradients are the same"
        )
    when = f"after step {moment.ordinal} of the optimizer" if moment.ordinal else "before the first optimizer step"
    return Verdict(
        sentence=f"the parameters of {wraps[rank].module_class or 'the model'} differ between {rank_list(ranks)} "
        f"{when}, {moment.unequal[0]} first",
        remedy=_REMEDIES[cause],
        locations=tuple(dict.fromkeys((stepped, place))),
        ranks=ranks,
        # Each rank may be meant to have one of its own, as a memory of its samples.
        severity=Severity.WARNING if cause == "own-state" else None,
        because=(
            differ(len(moment.unequal), moment.compared, names, step=moment.ordinal),
            *(((reason, stepped if cause == "own-step" else None),) if reason else ()),
            *(_writes(record, moment.wrap, moment.unequal) if cause == "own-state" else ()),
            ("the model is wrapped here", place),
        ),
    )


def hand_kept_replicas(record: RunRecord) -> Iterator[Verdict]:
    """Yield optimizers that step with gradients averaged by the script on parameters that are not the same."""
    ranks = record.rank_numbers()
    for moment in kept_by_hand(record):
        made = [one for one in record.made_parameters if one.rank == min(ranks) and one.optimizer == moment.optimizer]
        known = {key: name for one in made for key, name in one.names.items() if name}
        first = moment.unequal[0]
        chain = record.site(next((one.site for one in made if first in one.names), -1))
        steps = [step for step in record.optimizer_steps if step.optimizer == moment.optimizer]
        own = [step for step in steps if step.rank == min(ranks)]
        stepped = site_location(record.site(own[0].site)) if own else None
        rates = {step.rank: step.learning_rates for step in moment.steps.values()}
        cause, reason = "unknown" if moment.ordinal else "made-apart", ""
        if len(set(rates.values())) > 1:
            cause = "learning-rates"
            reason = f"the learning rates differ ({'; '.join(f'rank {rank}: {rates[rank]}' for rank in ranks)})"
        when = f"after step {moment.ordinal} of the optimizer" if moment.ordinal else "before the first optimizer step"
        shown = ", ".join(folded(known.get(name, name).partition(" of ")[0] for name in moment.unequal))
        told = f"{len(moment.unequal):,} of {moment.compared:,} parameters differ: {shown}"
        numbers = {"parameters": len(moment.unequal), "compared": moment.compared, "step": moment.ordinal}
        place = stepped if moment.ordinal else site_location(chain)
        yield Verdict(
            sentence=f"the ranks average the gradients of parameters that differ between {rank_list(ranks)} {when}, "
            f"{known.get(first, first)} first",
            remedy=_REMEDIES[cause],
            locations=place or stepped,
            ranks=ranks,
            because=(
                (told, None if moment.ordinal else Via(place, chain.frames), numbers),
                *(((reason, None),) if reason else ()),
                *(() if moment.ordinal else _seeded_apart(record, own[0].time_ns if own else math.inf)),
                ("this step uses gradients that are the same on all ranks: the script averages them", stepped),
            ),
        )


def sharded_replicas(record: RunRecord) -> Iterator[Verdict]:
    """Yield the sharded modules whose replicas begin with different parameters: nothing broadcasts these."""
    for number in sorted({one.module for one in record.sharded_modules}, reverse=True):
        held = {one.rank: one for one in record.sharded_modules if one.module == number}
        for group in sorted({ranks for one in held.values() for ranks, _ in one.replicas}):
            digests = {rank: dict(held[rank].replicas).get(group, {}) for rank in group if rank in held}
            if len(digests) < len(group):
                continue
            compared, unequal = common_and_unequal(digests)
            if not unequal:
                continue
            module = held[group[0]]
            place = site_location(record.site(module.site))
            seeded = tuple(_seeded_apart(record, module.time_ns))
            yield Verdict(
                sentence=f"{rank_list(group)} hold replicas of the same shards of {module.module_class} and begin with "
                f"different parameters, {unequal[0]} first: {module.by} never makes them alike",
                remedy=_REMEDIES["shards-apart"],
                locations=seeded[-1][1] if seeded else place,
                ranks=group,
                because=(
                    differ(len(unequal), len(compared), folded(unequal), "shards"),
                    *seeded,
                    ("the first forward of the sharded module", place),
                ),
            )


_PARTS = {
    "hybrid": "HYBRID_SHARD over a mesh whose shard dimension has one rank became NO_SHARD",
    "mesh": "it was given a part of a larger mesh",
    "group": "its group, or mesh, has no other ranks",
}


def shards_apart(record: RunRecord) -> Iterator[Verdict]:
    """Yield the sharded modules of which ranks hold the same shards and reduce their gradients over other ranks.

    Only where the shards began alike, the first inputs differ, and so do gradients and shards in every step. Left out
    are experts and stages, to which tensors are handed, models that are averaged by hand, and of groups that are no
    part of a mesh those that no sampler feeds with their part of the data.
    """
    divergence = find_divergence(record)
    if exchanges(record) or may_be_averaged_later(record) or (divergence and divergence.form in SPOILS_GRADIENTS):
        return
    fed = {one.rank for one in _sharding(record)}
    told = set[int]()
    for place, number in sorted({(part.place, part.module) for part in record.sharded_parts}):
        held = {one.rank: one for one in record.sharded_modules if one.module == number}
        parts = [part for part in record.sharded_parts if (part.module, part.place) == (number, place)]
        ranks = tuple(sorted({part.rank for part in parts}))
        alike = [
            part
            for part in parts
            if part.rank == ranks[0]
            and not set(ranks) <= set(part.ranks)
            and sum(part.digests == other.digests for other in parts) == len(ranks)
            and (part.why != "group" or fed.issuperset(ranks))
        ]
        names = {name for part in alike for name in part.digests}
        steps = [_narrowed(step, names) for step in around_steps(record, record.gradient_digests, number, ranks)]
        after = {(s.optimizer, s.ordinal): s for s in around_steps(record, record.parameter_digests, number, ranks)}
        parted = all(s.unequal and (a := after.get((s.optimizer, s.ordinal))) and a.unequal for s in steps)
        if number in told or not steps or not parted or len({held[rank].inputs for rank in ranks if rank in held}) < 2:
            continue
        if any(averaged_by_hand(record, rank, steps[0].steps[rank].elements) for rank in ranks):
            continue
        told.add(number)
        module, first, unequal, location = held[ranks[0]], alike[0], steps[0].unequal, record.site(alike[0].site)
        over = f"over {rank_list(first.ranks)} {'alone' if len(first.ranks) == 1 else 'only'}"
        yield Verdict(
            sentence=f"{module.by} reduces gradients of {module.module_class} {over}, and {rank_list(ranks)} train "
            "different models",
            remedy=_REMEDIES[first.why],
            locations=site_location(location),
            ranks=ranks,
            because=(
                (f"{_PARTS[first.why]}: gradients are reduced {over}", site_location(location)),
                (
                    f"{rank_list(ranks)} begin with the same shards and are fed other data; before each of "
                    f"{len(steps)} steps gradients of {len(unequal):,} of {len(names):,} parameters differ, and so do "
                    f"the parameters after it: {', '.join(folded(unequal))}",
                    None,
                    {"steps": len(steps), "parameters": len(unequal), "compared": len(names)},
                ),
            ),
        )


def _seeded_apart(record: RunRecord, before_ns: float) -> Iterator[tuple[str, Location | None]]:
    """Yield the first line before a moment at which ranks seed torch with different numbers: models are made early."""
    ranks, by_site = record.rank_numbers(), dict[int, dict[int, int | None]]()
    for seeding in record.seedings:
        if seeding.library == "torch" and seeding.time_ns < before_ns:
            by_site.setdefault(seeding.site, {}).setdefault(seeding.rank, seeding.value)
    apart = [
        (site, values)
        for site, values in by_site.items()
        if len(values) == len(ranks) and len(set(values.values())) > 1
    ]
    for site, values in apart[:1]:
        shown = ", ".join(f"{values[rank]} on rank {rank}" for rank in ranks[:4])
        yield f"torch is seeded with {shown} here", site_location(record.site(site))


def _cause(record: RunRecord, moment: ReplicaStep, wraps: Mapping[int, Wrap]) -> str:
    """Return why the parameters of a wrap differ: the key of its remedy."""
    if not moment.ordinal:
        return "after-the-wrap"
    wrap = wraps[min(wraps)]
    if not any(tensor.requires_grad for tensor in wrap.parameters if tensor.name in moment.unequal):
        return "own-state"
    frames = (frame for step in moment.steps.values() for frame in record.site(step.site).frames)
    if any(frame.function.rpartition(".")[2] == "forward" for frame in frames):
        return "own-step"  # A module steps an optimizer in its own forward, before DDP averages anything of that step.
    steps = around_steps(record, record.gradient_digests, moment.wrap, tuple(wraps))
    at = moment.optimizer, moment.ordinal
    if any((step.optimizer, step.ordinal) == at and step.unequal for step in steps):
        return "gradients"
    if len({step.learning_rates for step in moment.steps.values()}) > 1:
        return "learning-rates"
    return "written" if _writers(record, moment) else "unknown"


def _writers(record: RunRecord, moment: ReplicaStep) -> tuple[int, ...]:
    """Return the ranks on which parameters changed right before or after a step, other than by an optimizer."""
    of_these = [one for one in record.written_between if (one.optimizer, one.wrap) == (moment.optimizer, moment.wrap)]
    rows = [one for one in of_these if one.step == moment.ordinal - 1] or [
        one for one in of_these if one.step == moment.ordinal
    ]
    return tuple(sorted({one.rank for one in rows if set(one.names) & set(moment.unequal)}))
