"""Whether the ranks train on different samples, and in every epoch in another order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ddpdoctor.check import Verdict
from ddpdoctor.checks.data.missing_set_epoch import DEAL_OUT, KEPT_COPIES, batches_remedy, samples_remedy
from ddpdoctor.diagnosis.training.pass_lengths import (
    LoaderOnRanks,
    compare_samples,
    feeds_ddp,
    loaders_on_all_ranks,
    trains_on_own_data,
)
from ddpdoctor.diagnosis.wording import rank_list, site_location, verb
from ddpdoctor.finding import Severity, grouped
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.training import Loader, Pass

DUPLICATED_SHARE = 0.9
"""Share of the smaller index list that two ranks must have in common."""
SHARDED_SHARE = 0.5
"""Share below which the ranks draw different samples; a padded sampler shares a few."""
INPUTS_COMPARED = 3
"""Training forwards with equal inputs on all ranks that prove an iterable data set is not sharded."""


def judge_sharding(record: RunRecord) -> Iterator[Verdict]:
    """Yield a verdict for each loader that feeds a DDP module and about which something can be proved."""
    if not trains_on_own_data(record):
        return
    if (unloaded := _judge_unloaded(record)) is not None:
        yield unloaded
    wrongly_told = {loader.loaders for loader, _ in wrong_sampler_ranks(record)}
    for loader in loaders_on_all_ranks(record):
        if loader.loaders in wrongly_told or not all(feeds_ddp(record, entry) for entry in loader.loaders):
            continue
        by_index = not all(entry.iterable for entry in loader.loaders)
        if by_index and any(entry.index_count for own in loader.passes for entry in own):
            verdict = _judge_indices(loader)
        else:
            verdict = _judge_inputs(record, loader)
            if by_index and verdict is not None and not verdict.wrong:
                verdict = None  # What is drawn at random besides makes equal samples differ.
        if verdict is not None:
            yield verdict


def _judge_indices(loader: LoaderOnRanks) -> Verdict | None:
    place = next((entries for entries in loader.pass_places() if all(entry.backwards for entry in entries)), None)
    if place is None or any(not entry.index_count for entry in place):
        return None
    overlap = _overlap(place, loader)
    if overlap is None:
        return None
    counts = [entry.index_count or 0 for entry in place]
    comparison = compare_samples(loader.loaders)
    total = loader.loaders[0].dataset_length or max(counts)
    drawn = f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"
    overlapping = f"each draw {drawn} of {total:,} samples, {overlap.common:,} of them the same"
    if overlap.share <= SHARDED_SHARE:
        return _verdict(loader, f"{rank_list(loader.ranks)} {overlapping}", wrong=False)
    if comparison == "different":
        return _verdict(loader, "the data behind equal indices differ between the ranks", wrong=False)
    if overlap.common < DUPLICATED_SHARE * min(counts) or overlap.repetitions or comparison == "meaningless":
        return None
    shards = any(entry.sampler_shards for entry in loader.loaders)
    if shards and overlap.common >= total <= len(counts):
        return None  # a data set smaller than the number of ranks is padded to the same on all of them
    shards = shards and overlap.common < total  # Whoever goes through all of it does not, whatever it derives from.
    if comparison == "unknown":
        reason = f"{rank_list(loader.ranks)} {overlapping}, but the samples behind the indices could not be compared"
        return _verdict(loader, reason, wrong=None)
    sampler = loader.loaders[0].sampler_type or "no sampler"
    divides = "was given the same rank everywhere" if shards else "does not divide by rank"
    return _verdict(
        loader,
        f"{rank_list(loader.ranks)} train on the same samples: they {overlapping}",
        because=(
            (
                f"the whole index lists of the first training pass have {overlap.common:,} of {min(counts):,} indices "
                f"in common on all ranks; the sampler is {sampler}, which {divides}",
                loader.location,
                {
                    "samples_drawn": min(counts),
                    "samples_shared": overlap.common,
                    "samples": total,
                    "ranks": len(counts),
                },
            ),
            ("the samples behind equal indices were fetched on every rank and are equal", loader.location),
        ),
        remedy=batches_remedy(sampler)
        if loader.loaders[0].own_batches and not shards
        else samples_remedy(loader.loaders[0].sampler_type or "", "shuffle=…", divides=shards),
    )


class _Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """How much the ranks' index lists have in common."""

    common: int
    """Indices that every rank draws."""
    share: float
    """0 when no two ranks draw the same index, 1 when all draw the same ones."""
    repetitions: bool = False
    """A rank draws an index twice and the lists differ: batches at random."""


def _overlap(place: tuple[Pass, ...], loader: LoaderOnRanks) -> _Overlap | None:
    """Compare the whole index lists of the ranks; None where they are not known."""
    count = place[0].index_count or 0
    if all(entry.index_digest and entry.index_digest == place[0].index_digest for entry in place):
        return _Overlap(common=count, share=1.0)
    if all(entry.indices for entry in place):
        sets = [set(entry.indices) for entry in place]
        total, largest = sum(map(len, sets)), max(map(len, sets))
        return _Overlap(
            common=len(set.intersection(*sets)),
            share=(total - len(set.union(*sets))) / (total - largest),
            repetitions=any(len(found) < len(entry.indices) for found, entry in zip(sets, place, strict=True)),
        )
    whole = all(
        entry.index_count == owner.dataset_length
        and owner.dataset_type != "Subset"
        and owner.sampler_type in ("SequentialSampler", "RandomSampler")
        for entry, owner in zip(place, loader.loaders, strict=True)
    )
    return _Overlap(common=count, share=1.0) if whole else None


def _judge_inputs(record: RunRecord, loader: LoaderOnRanks) -> Verdict | None:
    fed = grouped((one for one in record.forwards if one.trains), lambda one: (one.rank, one.pass_loader))
    digests = [[one.input_digest for one in fed.get((own.rank, own.loader), ())] for own in loader.loaders]
    steps = [step for step in zip(*digests, strict=False) if all(step)]
    if (repeated := _repeated_by_workers(record, loader)) is not None:
        return repeated
    if len(steps) < INPUTS_COMPARED:
        return None
    equal = sum(len(set(step)) == 1 for step in steps)
    if not equal:
        if any(entry.workers > 1 for entry in loader.loaders):
            return None  # Its workers may still go through the same items, in orders of their own.
        return _verdict(loader, f"the inputs of {len(steps)} training forwards differ between the ranks", wrong=False)
    if equal < len(steps) or len({step[0] for step in steps}) == 1:
        return None
    kind = loader.loaders[0].dataset_type or "the iterable data set"
    return _verdict(
        loader,
        f"{rank_list(loader.ranks)} train on the same samples: {kind} gave all of them equal inputs in each of "
        f"{len(steps)} steps",
        because=(
            f"the digests of the inputs of {len(steps)} training forwards are equal on all ranks and differ "
            "between steps",
            loader.location,
            {"steps": len(steps), "ranks": len(loader.ranks)},
        ),
        remedy=DEAL_OUT if loader.loaders[0].iterable else _remedy(loader),
    )


def _remedy(loader: LoaderOnRanks) -> str:
    """Return the remedy for a loader whose sampler draws the same on every rank."""
    if loader.location is not None and loader.location.function.endswith(".get_train_dataloader"):
        return "Return self.accelerator.prepare(...) of it, as the Trainer's own method does: that divides it by rank."
    return samples_remedy(loader.loaders[0].sampler_type or "", "shuffle=…", divides=False)


def _repeated_by_workers(record: RunRecord, loader: LoaderOnRanks) -> Verdict | None:
    """Return a verdict where the workers of every rank, which give its batches in turn, all give the same ones."""
    workers = loader.loaders[0].workers
    rounds: dict[tuple[int, int, int], list[str]] = {}
    for (rank, ordinal), inputs in _inputs(record, loader).items() if workers > 1 else ():
        for batch, digest in inputs.items():
            rounds.setdefault((rank, ordinal, batch // workers), []).append(digest)
    whole = {place: digests for place, digests in rounds.items() if len(digests) == workers}
    if {rank for rank, _, _ in whole} != set(loader.ranks) or any(len(set(found)) > 1 for found in whole.values()):
        return None
    seen = {rank: {digests[0] for place, digests in whole.items() if place[0] == rank} for rank in loader.ranks}
    if any(len(digests) == 1 for digests in seen.values()):
        return None  # Inputs that never change show nothing.
    rounds_each = len(whole) // len(loader.ranks)
    return _verdict(
        loader,
        f"{rank_list(loader.ranks)} train on every batch {workers} times: the {workers} workers of this DataLoader "
        f"gave equal batches in each of {rounds_each} rounds",
        because=(
            f"the digests of the inputs of {workers} training forwards in turn, one of each worker, are equal",
            loader.location,
            {"rounds": rounds_each, "workers": workers, "ranks": len(loader.ranks)},
        ),
        remedy=DEAL_OUT,
    )


def _judge_unloaded(record: RunRecord) -> Verdict | None:
    """Compare the inputs of training that draws from no loader; only equal ones say something."""
    ranks = record.rank_numbers()
    fed = [[forward for forward in record.forwards if forward.rank == rank and forward.trains] for rank in ranks]
    if len(ranks) < 2 or any(forward.pass_loader != -1 for forwards in fed for forward in forwards):
        return None
    steps = [step for step in zip(*fed, strict=False) if all(forward.input_digest for forward in step)]
    equal = [step for step in steps if len({forward.input_digest for forward in step}) == 1]
    if len(steps) < INPUTS_COMPARED or len(equal) < len(steps) or len({s[0].input_digest for s in steps}) == 1:
        return None
    place = site_location(record.site(steps[0][0].site))
    return Verdict(
        severity=Severity.WARNING,
        sentence=f"{rank_list(ranks)} train on the same batches: the inputs of all {len(steps)} steps are equal",
        locations=place,
        ranks=ranks,
        because=(
            f"the digests of the inputs of {len(steps)} training forwards are equal on all ranks",
            place,
            {"steps": len(steps), "ranks": len(ranks)},
        ),
        remedy="Draw different batches on each rank: seed what draws them with seed + rank, or give each rank its own "
        "part of the data.",
    )


def _verdict(loader: LoaderOnRanks, sentence: str, **more: Any) -> Verdict:
    """Return a verdict on a loader of all its ranks."""
    return Verdict(sentence=sentence, locations=loader.location, ranks=loader.ranks, **more)


# Whether a shuffling, sharding sampler gives every training pass another order.


def judge_epochs(record: RunRecord) -> Iterator[Verdict]:
    """Yield a verdict for each line that makes a loader with a shuffling, sharding sampler used for training twice."""
    yield from _judge_copies(record)
    judged: set[int] = set()
    for loader in sorted(record.loaders, key=lambda entry: (entry.rank, entry.loader)):
        if loader.site in judged or not (loader.sampler_shards and loader.sampler_shuffles):
            continue
        verdict = _judge(record, loader)
        if verdict is not None:
            judged.add(loader.site)
            yield verdict


def _judge_copies(record: RunRecord) -> Iterator[Verdict]:
    """Yield the loaders whose kept workers gave the first pass again, though what items are made with was set anew."""
    for loader in loaders_on_all_ranks(record):
        stale = [entry for passes in loader.passes for entry in passes if entry.stale and entry.backwards]
        if {entry.rank for entry in stale} != set(loader.ranks):
            continue
        inputs = _inputs(record, loader)
        compared = [
            (one.rank, first[batch], later[batch])
            for one in stale
            for first, later in [(inputs.get((one.rank, 0), {}), inputs.get((one.rank, one.ordinal), {}))]
            for batch in first.keys() & later.keys()
        ]
        if any(first != later for _, first, later in compared):
            continue
        if any(len({first for own, first, _ in compared if own == rank}) < 2 for rank in loader.ranks):
            continue  # Inputs that never change show nothing.
        yield _verdict(
            loader,
            "the workers of this DataLoader give the same batches in every pass: they are kept, and never see "
            f"`{stale[0].stale[0]}`, which is set anew on the rank's own copy of the data set",
            because=(
                "the inputs of the first training forwards of each later pass are those of the first one",
                loader.location,
                {"forwards": len(compared) // len(loader.ranks), "ranks": len(loader.ranks)},
            ),
            remedy=KEPT_COPIES,
        )


def _inputs(record: RunRecord, loader: LoaderOnRanks) -> Mapping[tuple[int, int], Mapping[int, str]]:
    """Return the digests of the inputs of a loader's training forwards: by rank and pass, by batch."""
    found: dict[tuple[int, int], dict[int, str]] = {}
    owners = {(owner.rank, owner.loader) for owner in loader.loaders}
    for forward in record.forwards:
        if forward.trains and forward.input_digest and (forward.rank, forward.pass_loader) in owners:
            found.setdefault((forward.rank, forward.pass_ordinal), {})[forward.batch] = forward.input_digest
    return found


def _judge(record: RunRecord, loader: Loader) -> Verdict | None:
    passes = [
        entry
        for entry in record.passes
        if entry.rank == loader.rank and entry.loader == loader.loader and entry.backwards and entry.index_digest
    ]
    passes.sort(key=lambda entry: entry.ordinal)
    place = site_location(record.site(loader.site))
    if place is None or len(passes) < 2 or (passes[0].index_count or 0) < 2:
        return None
    alike = _pair(passes)
    # A sampler's epoch is 0 until set_epoch is called, and after set_epoch(step // len(loader)) in passes cut short.
    never_called = not any(entry.set_epoch or entry.told_epoch for entry in passes)
    if alike is not None and never_called:
        first, second = alike
        count = first.index_count or 0
        return Verdict(
            sentence=f"rank {loader.rank} drew its {count:,} samples in the same order in {len(passes)} training "
            f"passes: set_epoch was never called on the {loader.sampler_type or 'sampler'}",
            locations=place,
            because=(
                f"passes {first.ordinal} and {second.ordinal} of this loader have the same digest of {count:,} "
                "indices, and set_epoch was not called",
                place,
                {"samples": count, "passes": len(passes)},
            ),
        )
    if alike is None and not never_called and not any(entry.stale for entry in passes):
        return Verdict(
            wrong=False,
            sentence=f"set_epoch was called and the order changed between {len(passes)} training passes",
            locations=place,
        )
    return None


def _pair(passes: list[Pass]) -> tuple[Pass, Pass] | None:
    seen: dict[str, Pass] = {}
    for entry in passes:
        if entry.index_digest in seen:
            return seen[entry.index_digest], entry
        seen[entry.index_digest] = entry
    return None


# Whether samplers were told the ranks that draw from them, and divide one order between them.


def wrong_sampler_ranks(record: RunRecord) -> Iterator[tuple[LoaderOnRanks, Verdict]]:
    """Yield the training loaders whose samplers leave shards out.

    Samplers for fewer or more shards than there are ranks are left out: ranks that work on one batch together share a
    shard on purpose, and the number of ranks is the rehearsal's own.
    """
    for loader in loaders_on_all_ranks(record):
        told = {entry.rank: entry.sampler_rank for entry in loader.loaders}
        if any(entry.sampler_replicas != len(told) for entry in loader.loaders) or None in told.values():
            continue
        missing = tuple(sorted(set(loader.ranks) - set(told.values())))
        trained = any(entry.backwards for passes in loader.passes for entry in passes)
        if not missing or not trained:
            continue
        sampler = site_location(record.site(loader.loaders[0].sampler_site))
        kind = loader.loaders[0].sampler_type
        samples = loader.loaders[0].dataset_length or 0
        verdict = Verdict(
            sentence=f"{kind} was given the wrong rank: no rank draws the shard of {rank_list(missing)}, "
            f"{len(missing)}/{len(told)} of the {samples:,} samples",
            locations=tuple(dict.fromkeys((sampler, loader.location))),
            ranks=loader.ranks,
            because=tuple(
                (f"{rank_list(ranks)} {verb(ranks, 'was', 'were')} given rank {number}", sampler or loader.location)
                for number in sorted({number for number in told.values() if number is not None})
                for ranks in [[rank for rank, own in told.items() if own == number]]
            ),
        )
        yield loader, verdict


def overlapping_shards(record: RunRecord) -> Iterator[Verdict]:
    """Yield the training loaders whose sampler divides by rank, but another order on each.

    Needs the whole lists. A sampler without a seed is judged only where the overlap is that of independent orders:
    repeated augmentation shares samples between ranks on purpose, and all of them.
    """
    wrong = {loader.loaders for loader, _ in wrong_sampler_ranks(record)}
    for loader in loaders_on_all_ranks(record):
        first, count = loader.loaders[0], len(loader.loaders)
        place = next((found for found in loader.pass_places() if all(entry.backwards for entry in found)), None)
        if place is None or loader.loaders in wrong or not all(entry.indices for entry in place):
            continue
        if any(entry.sampler_replicas != count for entry in loader.loaders):
            continue
        shards = [set(entry.indices) for entry in place]
        drawn, union = sum(map(len, shards)), len(set.union(*shards))
        total = first.dataset_length or 0
        repeats = any(len(shard) < len(entry.indices) for shard, entry in zip(shards, place, strict=True))
        left_out = total - union - (total % count if drawn < total else 0)
        if not total or repeats or drawn - union <= count or left_out <= 0:
            continue
        if compare_samples(loader.loaders) == "different":
            continue
        found = _why_apart(loader, place)
        has_seed = first.sampler_type == "DistributedSampler" and first.sampler_seed is not None
        # torch's own makes one order of one seed and epoch: then the data sets differ, as after a split without a seed.
        if found is None and not has_seed:
            found = _of_own_order(first.sampler_type, drawn - union, shards, total)
        if found is not None:
            cause, remedy = found
            sampler = site_location(record.site(first.sampler_site))
            yield Verdict(
                sentence=f"the shards of {rank_list(loader.ranks)} overlap: {drawn - union:,} of {total:,} samples are "
                f"drawn by more than one rank and {left_out:,} by none, as {cause}",
                remedy=remedy,
                locations=tuple(dict.fromkeys((sampler, loader.location))),
                ranks=loader.ranks,
                because=(
                    cause,
                    sampler or loader.location,
                    {"samples_shared": drawn - union, "samples_left_out": left_out},
                ),
            )


def _why_apart(loader: LoaderOnRanks, place: tuple[Pass, ...]) -> tuple[str, str] | None:
    """Return what the ranks' samplers were given differently, and the remedy."""
    kind = loader.loaders[0].sampler_type
    for what, values in (
        ("seed", [entry.sampler_seed for entry in loader.loaders]),
        ("epoch", [entry.set_epoch for entry in place]),
    ):
        if len(set(values)) > 1 and None not in values:
            given = ", ".join(f"{value} on rank {rank}" for value, rank in zip(values, loader.ranks, strict=True))
            return (
                f"the {what} of {kind} differs between ranks: {given}",
                f"Give {kind} the same {what} on every rank: it takes the rank into account itself. Draw it once, or "
                "broadcast it from rank 0, if it is random or from the clock.",
            )
    return None


def _of_own_order(kind: str, shared: int, shards: list[set[int]], total: int) -> tuple[str, str] | None:
    """Return what to say where an epoch is divided and the overlap is that of independent orders, within a fifth."""
    if sum(map(len, shards)) + len(shards) <= total:
        return None  # random batches, of which no epoch is made
    left = 1.0
    for shard in shards:
        left *= 1 - len(shard) / total
    expected = sum(map(len, shards)) - total * (1 - left)
    if not 0.8 * expected <= shared <= 1.2 * expected:
        return None
    return (
        f"each rank's {kind} divides an order of its own",
        f"Let {kind} shuffle by a generator of its own whose seed is the same on every rank, as in "
        "torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)), before it takes the rank's part.",
    )
