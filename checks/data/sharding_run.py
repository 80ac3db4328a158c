"""Whether the ranks train on different samples: whole index lists, the data behind them, or the inputs themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from ddpdoctor.checks.data.epochs_source import batches_remedy
from ddpdoctor.checks.data.sampler_ranks_run import wrong_sampler_ranks
from ddpdoctor.diagnosis.training.pass_lengths import (
    LoaderOnRanks,
    compare_samples,
    feeds_ddp,
    loaders_on_all_ranks,
    trains_on_own_data,
)
from ddpdoctor.diagnosis.wording import rank_list, site_location
from ddpdoctor.finding import Location, Severity
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.training import Pass

DUPLICATED_SHARE = 0.9
"""Share of the smaller index list that two ranks must have in common."""
SHARDED_SHARE = 0.5
"""Share below which the ranks draw different samples; a padded sampler shares a few."""
INPUTS_COMPARED = 3
"""Training forwards with equal inputs on all ranks that prove an iterable data set is not sharded."""


class Sharding(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one loader that feeds training."""

    duplicated: bool | None
    """True: every rank draws the same samples. False: they draw different ones. None: it cannot be known."""
    sentence: str
    location: Location | None
    ranks: tuple[int, ...]
    numbers: Mapping[str, int | float] = {}
    evidence: tuple[str, ...] = ()
    remedy: str = ""
    severity: Severity | None = None
    """None: as bad as the check says."""


def judge_sharding(record: RunRecord) -> Iterator[Sharding]:
    """Yield a verdict for each loader that feeds a DDP module and about which something can be proved."""
    if not trains_on_own_data(record):
        return
    if (unloaded := _judge_unloaded(record)) is not None:
        yield unloaded
    wrongly_told = {wrong.loader.loaders for wrong in wrong_sampler_ranks(record)}
    for loader in loaders_on_all_ranks(record):
        if loader.loaders in wrongly_told or not all(feeds_ddp(record, entry) for entry in loader.loaders):
            continue
        if all(entry.iterable for entry in loader.loaders):
            verdict = _judge_inputs(record, loader)
        else:
            verdict = _judge_indices(loader)
        if verdict is not None:
            yield verdict


def _judge_indices(loader: LoaderOnRanks) -> Sharding | None:
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
        return _different(loader, f"{rank_list(loader.ranks)} {overlapping}")
    if comparison == "different":
        return _different(loader, "the data behind equal indices differ between the ranks")
    if overlap.common < DUPLICATED_SHARE * min(counts) or overlap.repetitions or comparison == "meaningless":
        return None
    shards = any(entry.sampler_shards for entry in loader.loaders)
    if shards and overlap.common >= total:
        return None  # a data set smaller than the number of ranks is padded to the same on all of them
    if comparison == "unknown":
        reason = f"{rank_list(loader.ranks)} {overlapping}, but the samples behind the indices could not be compared"
        return Sharding(duplicated=None, sentence=reason, location=loader.location, ranks=loader.ranks)
    sampler = loader.loaders[0].sampler_type or "no sampler"
    divides = "was given the same rank everywhere" if shards else "does not divide by rank"
    return Sharding(
        duplicated=True,
        sentence=f"{rank_list(loader.ranks)} train on the same samples: they {overlapping}",
        location=loader.location,
        ranks=loader.ranks,
        numbers={
            "samples_drawn": min(counts),
            "samples_shared": overlap.common,
            "samples": total,
            "ranks": len(counts),
        },
        evidence=(
            f"the whole index lists of the first training pass have {overlap.common:,} of {min(counts):,} indices in "
            f"common on all ranks; the sampler is {sampler}, which {divides}",
            "the samples behind equal indices were fetched on every rank and are equal",
        ),
        remedy=(
            f"Give {sampler} the rank and the number of ranks of the process group; DistributedSampler takes them "
            "from the process group by default."
        )
        if shards
        else batches_remedy(sampler)
        if loader.loaders[0].own_batches
        else "Give the loader sampler=DistributedSampler(dataset, shuffle=…) instead of shuffle=…, and call "
        "sampler.set_epoch(epoch) before every epoch.",
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


def _judge_inputs(record: RunRecord, loader: LoaderOnRanks) -> Sharding | None:
    digests = [
        [
            forward.input_digest
            for forward in record.forwards
            if forward.rank == owner.rank
            and forward.pass_loader == owner.loader
            and forward.wrapped
            and forward.training
            and forward.gradients
        ]
        for owner in loader.loaders
    ]
    steps = [step for step in zip(*digests, strict=False) if all(step)]
    if len(steps) < INPUTS_COMPARED:
        return None
    equal = sum(len(set(step)) == 1 for step in steps)
    if not equal:
        return _different(loader, f"the inputs of {len(steps)} training forwards differ between the ranks")
    if equal < len(steps) or len({step[0] for step in steps}) == 1:
        return None
    kind = loader.loaders[0].dataset_type or "the iterable data set"
    return Sharding(
        duplicated=True,
        sentence=f"{rank_list(loader.ranks)} train on the same samples: {kind} gave all of them equal inputs in each "
        f"of {len(steps)} steps",
        location=loader.location,
        ranks=loader.ranks,
        numbers={"steps": len(steps), "ranks": len(loader.ranks)},
        evidence=(
            f"the digests of the inputs of {len(steps)} training forwards are equal on all ranks and differ between "
            "steps",
        ),
        remedy="Let the data set skip by rank in __iter__ (items rank, rank + world_size, …), and by worker within the "
        "rank.",
    )


def _judge_unloaded(record: RunRecord) -> Sharding | None:
    """Compare the inputs of training that draws from no loader; only equal ones say something."""
    ranks = record.rank_numbers()
    fed = [
        [
            forward
            for forward in record.forwards
            if forward.rank == rank and forward.wrapped and forward.training and forward.gradients
        ]
        for rank in ranks
    ]
    if len(ranks) < 2 or any(forward.pass_loader != -1 for forwards in fed for forward in forwards):
        return None
    steps = [step for step in zip(*fed, strict=False) if all(forward.input_digest for forward in step)]
    equal = [step for step in steps if len({forward.input_digest for forward in step}) == 1]
    if len(steps) < INPUTS_COMPARED or len(equal) < len(steps) or len({s[0].input_digest for s in steps}) == 1:
        return None
    return Sharding(
        duplicated=True,
        severity=Severity.WARNING,
        sentence=f"{rank_list(ranks)} train on the same batches: the inputs of all {len(steps)} steps are equal",
        location=site_location(record.site(steps[0][0].site)),
        ranks=ranks,
        numbers={"steps": len(steps), "ranks": len(ranks)},
        evidence=(f"the digests of the inputs of {len(steps)} training forwards are equal on all ranks",),
        remedy="Draw different batches on each rank: seed what draws them with seed + rank, or give each rank its own "
        "part of the data.",
    )


def _different(loader: LoaderOnRanks, reason: str) -> Sharding:
    return Sharding(duplicated=False, sentence=reason, location=loader.location, ranks=loader.ranks)
