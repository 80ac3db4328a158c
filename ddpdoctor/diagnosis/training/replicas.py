"""Wraps and optimizer steps as all ranks of a replica saw them, and what differed between the ranks around a step."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Literal

import msgspec

from ddpdoctor.check import Reason, Verdict, Via
from ddpdoctor.diagnosis.divergence.divergence import Divergence, find_divergence
from ddpdoctor.diagnosis.divergence.unused_parameters import folded, waits_in_vain
from ddpdoctor.diagnosis.sync_points import replica_sets
from ddpdoctor.diagnosis.training.pass_lengths import LoaderOnRanks, loaders_on_all_ranks
from ddpdoctor.diagnosis.wording import count, rank_list, site_location
from ddpdoctor.finding import Location, grouped
from ddpdoctor.record.model import RunRecord, Wrap
from ddpdoctor.record.streams.training import Backward, OptimizerStep, Pass, ReplicaDigest, StepDigest

# Passes and trainings in which the ranks made as much, and averaged gradients different numbers of times.

_NO_RANKS: Set[int] = frozenset()


def drifts(record: RunRecord, in_backward: Set[int] = _NO_RANKS) -> Iterator[Verdict]:
    """Yield the first such pass of each loader that feeds a DDP module.

    It names the ranks that left something out, where the others averaged once for each batch; otherwise all.

    Only passes over the whole loader, by a ``for`` statement, outside of ``join()``, of ranks that average with each
    other: a loop that draws with ``next`` may legally draw another batch for one that it left out. Ranks that stand in
    a backward for good (``in_backward``) have a pass that is not over, and an averaging more than they could count.
    """
    if not record.wraps:
        return
    sets = replica_sets(record)
    for loader in loaders_on_all_ranks(record):
        found = (
            _drift(record, loader, tuple(entry for entry in entries if entry.rank in members), in_backward)
            for entries in loader.pass_places()
            for members in sets
        )
        drift = next(filter(None, found), None)
        if drift is not None:
            yield drift


def skipped_backward(record: RunRecord, divergence: Divergence) -> Verdict | None:
    """Find the backward that a rank left out which then ran to its end, while others wait in one that it never made."""
    in_backward, blocked = _in_backward(divergence, record), blocked_in_backward(divergence, record)
    # Of a rank that its peer's leaving threw out of the backward, the backward has been counted.
    counts = {beat.rank: (beat.forwards, beat.backwards + (beat.rank in blocked)) for beat in record.heartbeats}
    for members in replica_sets(record) if record.wraps else ():
        known = [counts[rank] for rank in members if rank in counts]
        made = {forwards for forwards, _ in known}
        if len(known) < len(members) or len(made) != 1 or not in_backward & set(members):
            continue
        backwards = tuple((rank, counts[rank][1]) for rank in members)
        most = max(number for _, number in backwards)
        fewer = {rank for rank, number in backwards if number < most}
        finished = {rank.rank for rank in record.ranks if rank.end == "finished"}
        if fewer and fewer <= finished and most <= max(made):
            parts = [f"rank {rank} {number:,}" for rank, number in backwards if number < most]
            whole = rank_list(rank for rank, number in backwards if number == most)
            forwards = count(max(made), "training forward", "training forwards")
            return Verdict(
                sentence=f"every rank made {forwards}, and {whole} {count(most, 'backward', 'backwards')}, "
                f"{', '.join(parts[:3])}",
                ranks=tuple(rank for rank in members if rank in fewer),
            )
    return None


def blocked_in_backward(divergence: Divergence, record: RunRecord) -> Set[int]:
    """Return the ranks that live and wait in a backward for one that does not come.

    Of ranks that diverge for good one whose reduction is not over waits, be it that its heartbeat has not said so yet.
    """
    return {rank.rank for rank in record.ranks if rank.end == "running"} & _in_backward(divergence, record)


def _in_backward(divergence: Divergence, record: RunRecord) -> Set[int]:
    """Return the ranks that diverge in a backward, alive or not."""
    return {
        turn.rank
        for turn in divergence.turns + divergence.proof
        if turn.signature is not None and turn.signature.origin == "ddp-backward"
        for track in (record.track(turn.rank),)
        if turn.waiting or (track is not None and turn.row is not None and not track.completed_ns[turn.row])
    }


def _drift(
    record: RunRecord, loader: LoaderOnRanks, entries: tuple[Pass, ...], in_backward: Set[int]
) -> Verdict | None:
    if len(entries) < 2 or any(entry.joined or not entry.looped or not entry.averaged for entry in entries):
        return None
    if len({entry.yielded for entry in entries}) > 1 or not any(entry.end == "exhausted" for entry in entries):
        return None
    gone = {rank.rank for rank in record.ranks if rank.end != "running"}
    if any(entry.end != "exhausted" and entry.rank not in gone | in_backward for entry in entries):
        return None
    averaged = tuple(
        (entry.rank, entry.averaged + (entry.end != "exhausted" and entry.rank in in_backward))
        for entry in entries
        if entry.averaged
    )
    if len({number for _, number in averaged}) == 1:
        return None
    numbers = dict(averaged)
    by_count = grouped(numbers, numbers.__getitem__)
    most, *fewer = sorted(by_count, reverse=True)
    parts = [f"{rank_list(by_count[most])} averaged gradients {count(most, 'time', 'times')}"]
    parts += [f"{rank_list(by_count[number])} {number:,}" for number in fewer[:3]]
    batches, location = entries[0].yielded, site_location(record.site(entries[0].site)) or loader.location
    where = f"pass {entries[0].ordinal} of this loader, which yielded {count(batches, 'batch', 'batches')}"
    return Verdict(
        sentence=f"in a pass of {count(batches, 'batch', 'batches')} for each {', '.join(parts)}",
        locations=location,
        ranks=tuple(rank for rank, number in averaged if number < most or most != batches),
        because=tuple(
            (
                f"rank {rank} averaged gradients {count(number, 'time', 'times')} in {where}",
                location,
                {"averaged": number, "batches": batches},
                rank,
            )
            for rank, number in averaged[:8]
        ),
    )


NO_WRAP = -1
"""Stands for parameters of no wrapped module."""
SPOILS_GRADIENTS = ("mismatch", "desync", "crossed", "swapped")


class ReplicaStep(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step on the ranks that should hold the same model."""

    wrap: int
    optimizer: int
    ordinal: int
    """n-th step of the optimizer, from 1; 0 is the moment before the first."""
    steps: Mapping[int, OptimizerStep]
    """By rank; empty for the moment before the first."""
    compared: int
    """Tensors that could be compared."""
    unequal: tuple[str, ...]
    """Names of those that differ between ranks."""


def replicated_wraps(record: RunRecord) -> Iterator[dict[int, Wrap]]:
    """Yield each wrap of two or more ranks by rank, where every rank of its group made it."""
    for number in sorted({wrap.wrap for wrap in record.wraps}):
        by_rank = {wrap.rank: wrap for wrap in record.wraps if wrap.wrap == number}
        # Of thousands of ranks each names them all: the same object is compared once.
        groups = set({id(wrap.ranks): wrap.ranks or record.rank_numbers() for wrap in by_rank.values()}.values())
        for group in sorted(groups):
            members = {rank: by_rank[rank] for rank in group if rank in by_rank}
            if len(group) > 1 and len(members) == len(group):
                yield members


def in_other_orders(record: RunRecord) -> Iterator[tuple[dict[int, Wrap], str, dict[int, tuple[str, ...]]]]:
    """Yield the wraps whose models the ranks built of the same things in other orders, which DDP pairs by place.

    With what they have in other orders: the first list of texts that they hold, or else the names of the parameters.
    """
    for wraps in replicated_wraps(record):
        first = wraps[min(wraps)]
        held = {name: {rank: wrap.texts.get(name, ()) for rank, wrap in wraps.items()} for name in first.texts}
        held["parameters"] = {rank: tuple(tensor.name for tensor in wrap.parameters) for rank, wrap in wraps.items()}
        for name, texts in held.items():
            if len(set(texts.values())) > 1 and len({tuple(sorted(one)) for one in texts.values()}) == 1:
                yield wraps, name, texts
                break


def judged_wraps(record: RunRecord) -> Iterator[dict[int, Wrap]]:
    """Yield the wraps of ``replicated_wraps`` whose reductions DDP made by itself and could finish.

    None where ranks paired collectives that do not belong together: what differs then has that one cause.
    """
    divergence = find_divergence(record)
    if divergence is not None and divergence.form in SPOILS_GRADIENTS:
        return
    for wraps in replicated_wraps(record):
        number = wraps[min(wraps)].wrap
        if not any(wrap.communication_hook for wrap in wraps.values()) and not waits_in_vain(record, number):
            yield wraps


def contributions(record: RunRecord, step: OptimizerStep, wrap: int) -> tuple[Backward, ...]:
    """Return the backwards whose gradients a step uses, in order of time: those since the gradients were cleared."""
    found: list[Backward] = []
    for backward in reversed(record.backwards):
        if backward.rank == step.rank and backward.time_ns < step.time_ns and wrap in backward.wraps:
            found.append(backward)
            if wrap not in backward.accumulated:
                break
    return tuple(reversed(found))


_AVERAGING = frozenset({"", "sum", "avg", "premul_sum"})


def averaged_by_hand(record: RunRecord, rank: int, elements: int) -> bool:
    """Return whether the user's collectives moved as much as half of so many elements in a training step of a rank."""
    track = record.track(rank)
    times = sorted(step.time_ns for step in record.optimizer_steps if step.rank == rank)
    if track is None or not elements or not times:
        return False
    moved: dict[int, int] = {}
    for signature, started_ns in zip(track.signature, track.started_ns, strict=True):
        entry = record.signatures[signature]
        # What is pickled, counts, and the largest of each number, by which replicas are compared, averages nothing.
        averages = entry.kind != "barrier" and "int" not in entry.dtype and entry.reduce_op in _AVERAGING
        if entry.origin == "user" and averages:
            interval = bisect_right(times, started_ns)
            moved[interval] = moved.get(interval, 0) + sum(entry.numels)
    return any(2 * count >= elements for interval, count in moved.items() if interval)


def exchanges(record: RunRecord) -> bool:
    """Return whether the script hands tensors from rank to rank, as to a stage or to experts: parts of one model."""
    kinds = ("all_to_all", "send", "recv")
    return any(entry.kind.startswith(kinds) for entry in record.signatures if entry.origin == "user")


def kept_by_hand(record: RunRecord) -> Iterator[ReplicaStep]:
    """Yield, for each optimizer, the first moment at which parameters differ that the ranks' own averages keep equal.

    Their gradients prove it: they are the same on all ranks before every step that was seen, and not the same in all
    steps, as zeros would be. What is one rank's own, an expert or a stage of a pipeline, has gradients of its own.
    """
    ranks = record.rank_numbers()
    divergence = find_divergence(record)
    if len(ranks) < 2 or (divergence is not None and divergence.form in SPOILS_GRADIENTS):
        return
    seen: dict[tuple[int, str], dict[int, list[str]]] = {}
    for entry in record.gradient_digests:
        if entry.wrap == NO_WRAP:
            for name, digest in entry.digests.items():
                seen.setdefault((entry.optimizer, name), {}).setdefault(entry.step, []).append(digest)
    averaged = {
        key
        for key, by_step in seen.items()
        if all(len(given) == len(ranks) and len(set(given)) == 1 for given in by_step.values())
        and len({given[0] for given in by_step.values()}) > 1
    }
    told: set[int] = set()
    moments = around_steps(record, record.parameter_digests, NO_WRAP, ranks)
    for moment in sorted(moments, key=lambda moment: (moment.optimizer, moment.ordinal)):
        unequal = tuple(name for name in moment.unequal if (moment.optimizer, name) in averaged)
        if unequal and moment.optimizer not in told:
            told.add(moment.optimizer)
            yield msgspec.structs.replace(moment, unequal=unequal)


def trained_by_hand(record: RunRecord) -> bool:
    """Return whether every rank stepped, wrapped nothing, and reduced as much as it trains by its own calls."""
    if record.wraps or is_sharded(record):
        return False
    trained = dict.fromkeys(record.rank_numbers(), 0)
    for step in record.optimizer_steps:
        trained[step.rank] = max(trained.get(step.rank, 0), step.elements)
    return bool(trained) and all(averaged_by_hand(record, rank, elements) for rank, elements in trained.items())


def is_sharded(record: RunRecord) -> bool:
    """Return whether ranks train parts of a model of which none holds the whole: what they reduce is scattered."""
    scattered = any(signature.kind.startswith("reduce_scatter") for signature in record.signatures)
    return scattered or bool(record.sharded_modules)


MOST_NUMBERS = 16
"""What is reduced with no more elements is a loss or a metric, by which no model is trained in common."""


def trained_in_common(record: RunRecord) -> bool:
    """Return whether every rank stepped, and in half of its steps at least moved more than numbers for the others.

    That is any job whose ranks work on one model, however it is divided among them: by replicas, shards or stages.
    """
    return bool(record.ranks) and all(_moves_tensors(record, rank) for rank in record.rank_numbers())


def _moves_tensors(record: RunRecord, rank: int) -> bool:
    track = record.track(rank)
    times = sorted(step.time_ns for step in record.optimizer_steps if step.rank == rank)
    if track is None or not times:
        return False
    # Whoever divides a model moves what its parts need: one of two layers moves 16 numbers between its ranks.
    divided = bool(record.sharded_modules) or any(step.divided for step in record.optimizer_steps)
    least, moved = 0 if divided else MOST_NUMBERS, set()
    for signature, started_ns in zip(track.signature, track.started_ns, strict=True):
        entry = record.signatures[signature]
        if entry.kind not in ("barrier", "monitored_barrier") and sum(entry.numels) > least:
            moved.add(bisect_left(times, started_ns))
    return 2 * len(moved - {len(times)}) >= len(times)


def may_be_averaged_later(record: RunRecord) -> bool:
    """Return whether the user's files hold a call that could average a model and that no rank came to."""
    sites = {site for track in record.collectives for site in track.site}
    reached = {(frame.file, frame.line) for site in sites for frame in record.site(site).frames}
    return any(place not in reached for written in record.written_averages for place in written.places)


def around_steps(
    record: RunRecord, digests: tuple[StepDigest, ...], wrap: int, ranks: tuple[int, ...]
) -> Iterator[ReplicaStep]:
    """Yield what the gradients or the parameters of ranks were around each step that every one of them made.

    Gradients before it; parameters after it, and before the first as step 0.
    """
    steps = {(step.optimizer, step.ordinal, step.rank): step for step in record.optimizer_steps}
    by_place: dict[tuple[int, int], dict[int, Mapping[str, str]]] = {}
    for entry in digests:
        if entry.wrap == wrap and entry.rank in ranks:
            by_place.setdefault((entry.optimizer, entry.step), {})[entry.rank] = entry.digests
    for (optimizer, ordinal), by_rank in sorted(by_place.items()):
        made = {rank: steps[optimizer, ordinal, rank] for rank in ranks if (optimizer, ordinal, rank) in steps}
        if len(by_rank) < len(ranks) or (ordinal and len(made) < len(ranks)):
            continue
        common, unequal = common_and_unequal(by_rank)
        yield ReplicaStep(
            wrap=wrap,
            optimizer=optimizer,
            ordinal=ordinal,
            steps=made,
            compared=len(common),
            unequal=tuple(unequal),
        )


def differ(unequal: int, compared: int, shown: Iterable[str], what: str = "parameters", **numbers: int) -> Reason:
    """Return how many of so many parameters differ, with the names that are shown."""
    text = f"{unequal:,} of {compared:,} {what} differ: {', '.join(shown)}"
    return text, None, {"parameters": unequal, "compared": compared, **numbers}


def common_and_unequal(digests: Mapping[int, Mapping[str, str]]) -> tuple[list[str], list[str]]:
    """Return the names that all ranks have, and those of them whose digests differ."""
    common = [name for name in digests[min(digests)] if all(name in own for own in digests.values())]
    return common, [name for name in common if len({own[name] for own in digests.values()}) > 1]


# Steps on gradients that DDP did not average, proved by the gradients themselves, and why it did not.

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
    shown: str
    """In how many steps they differ, and of how many."""
    unequal: int
    """Parameters whose gradients differ."""
    names: tuple[str, ...]
    """Folded names of them."""
    location: Location | None
    """What made the gradients: a backward, or a call of ``torch.autograd.grad``; else the step."""
    wrap_location: Location | None
    because: tuple[Reason, ...]
    """The numbers that prove it, the step that uses the gradients, and the wrap."""
    ever_synchronised: bool
    """At least one training forward of the wrap let DDP reduce."""

    def verdict(self, sentence: str, remedy: str) -> Verdict:
        """Return what is wrong, in the words of a check, at what made the gradients."""
        return Verdict(sentence=sentence, remedy=remedy, locations=self.location, because=self.because)


def unaveraged(record: RunRecord) -> Iterator[Unaveraged]:
    """Yield, for each wrap and reason, the first step whose gradients differ between the ranks.

    What a hook of the user reduces is left to the hook, what a step uses because the rehearsal cut a pass before it is
    no evidence, and where gradients were averaged by hand they do not differ. Models that never synchronise may be
    averaged at intervals: not judged while a call that could do so was not reached.
    """
    for wraps in judged_wraps(record):
        number, ranks = wraps[min(wraps)].wrap, tuple(wraps)
        steps = list(around_steps(record, record.gradient_digests, number, ranks))
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
    cuts = (one.ended_ns for one in record.passes if one.rank == rank and one.end in ("cut", "counted"))
    if used and any(used[-1].time_ns < ended_ns < own.time_ns for ended_ns in cuts):
        return None
    late: list[Backward] = []
    for backward in used:
        late = [] if step.wrap in backward.synchronised else [*late, backward]
    if late:
        why = next(entry.why for entry in late[-1].unreduced if entry.wrap == step.wrap)
        local = why == "no-sync" and averaged_by_hand(record, rank, own.elements)
        return None if local else (why, late[-1].site)
    made = (one for one in record.optimizer_steps if (one.rank, one.optimizer) == (rank, own.optimizer))
    before_ns = max((one.time_ns for one in made if one.ordinal < own.ordinal), default=0)
    for taken in record.gradients_taken:
        if taken.rank == rank and step.wrap in taken.wraps and before_ns < taken.time_ns < own.time_ns:
            return "autograd-grad", taken.site
    return "unknown", own.site


def _described(
    record: RunRecord, wraps: Mapping[int, Wrap], why: Why, site: int, affected: list[ReplicaStep], compared: int
) -> Unaveraged:
    first, rank = affected[0], min(wraps)
    ranks, names = tuple(wraps), folded(first.unequal)
    model, chain = wraps[rank].module_class or "the model", record.site(site)
    location, wrapped = site_location(chain), site_location(record.site(wraps[rank].site))
    shown = f"{len(affected)} of {compared} steps"
    differ = (
        f"in {shown} the gradients differ between {rank_list(ranks)}, first in step {first.ordinal}: "
        f"{len(first.unequal):,} of {first.compared:,} parameters of {model} ({', '.join(names)})"
    )
    numbers = {
        "parameters": len(first.unequal),
        "compared": first.compared,
        "step": first.ordinal,
        "steps_affected": len(affected),
        "steps_compared": compared,
    }
    return Unaveraged(
        why=why,
        wrap=first.wrap,
        model=model,
        ranks=ranks,
        step=first.ordinal,
        shown=shown,
        unequal=len(first.unequal),
        names=names,
        location=location,
        wrap_location=wrapped,
        because=(
            (differ, Via(location, chain.frames), numbers),
            ("this step uses them", site_location(record.site(first.steps[rank].site))),
            ("the model is wrapped here", wrapped),
        ),
        ever_synchronised=any(entry.wrap == first.wrap and entry.synchronised for entry in record.forwards),
    )


# Replicas of a live run that are no longer the same: a flipped bit, or code that changes some of them.

NAMES_SHOWN = 3


def drifted_digests(record: RunRecord) -> Iterator[Verdict]:
    """Yield the first such step of each model that all its ranks have digested after as many reductions."""
    for wraps in replicated_wraps(record):
        first = wraps[min(wraps)]
        by_step: dict[int, dict[int, ReplicaDigest]] = {}
        for row in record.replica_digests:
            if row.wrap == first.wrap and row.rank in wraps:
                by_step.setdefault(row.step, {})[row.rank] = row
        same = 0
        for step, rows in sorted(by_step.items()):
            if len(rows) < len(wraps) or len({row.iterations for row in rows.values()}) > 1:
                continue
            names, unequal = common_and_unequal({rank: row.digests for rank, row in rows.items()})
            if not unequal:
                same = step
                continue
            held = {rank: rows[rank].digests[unequal[0]] for rank in sorted(rows)}
            majority = max(grouped(held, held.__getitem__).values(), key=len)
            odd = [rank for rank in sorted(rows) if rank not in majority] if 2 * len(majority) > len(rows) else []
            ranks = tuple(odd or sorted(rows))
            told = f"{'has' if len(odd) == 1 else 'have'} other ones than the rest" if odd else "do not agree"
            place = site_location(record.site(first.site))
            before = f"they were the same after step {same:,}" if same else "they were compared for the first time"
            yield Verdict(
                sentence=f"the parameters of {first.module_class or 'the model'} differ between the ranks after step "
                f"{step:,}: {rank_list(ranks)} {told}, of {unequal[0]} first",
                locations=place,
                ranks=ranks,
                because=(
                    differ(len(unequal), len(names), unequal[:NAMES_SHOWN], step=step),
                    (before, None),
                    ("the model is wrapped here", place),
                ),
            )
            break
