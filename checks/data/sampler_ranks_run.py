"""Whether samplers were told the ranks that draw from them, and divide one order between them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.diagnosis.training.pass_lengths import LoaderOnRanks, compare_samples, loaders_on_all_ranks
from ddpdoctor.diagnosis.wording import rank_list, site_location, verb
from ddpdoctor.finding import Location
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.training import Pass


class WrongSamplerRanks(msgspec.Struct, frozen=True, kw_only=True):
    """A sampler for all ranks of the job, of which several were told the same rank."""

    loader: LoaderOnRanks
    sentence: str
    locations: tuple[Location, ...]
    """The sampler's line, where it is known, and the loader's."""
    facts: tuple[str, ...]
    missing: tuple[int, ...]
    """Ranks whose shard no one draws."""


def wrong_sampler_ranks(record: RunRecord) -> Iterator[WrongSamplerRanks]:
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
        yield WrongSamplerRanks(
            loader=loader,
            sentence=f"{kind} was given the wrong rank: no rank draws the shard of {rank_list(missing)}, "
            f"{len(missing)}/{len(told)} of the {samples:,} samples",
            locations=tuple(dict.fromkeys(place for place in (sampler, loader.location) if place is not None)),
            facts=tuple(
                f"{rank_list(ranks)} {verb(ranks, 'was', 'were')} given rank {number}"
                for number in sorted({number for number in told.values() if number is not None})
                for ranks in [[rank for rank, own in told.items() if own == number]]
            ),
            missing=missing,
        )


class OverlappingShards(msgspec.Struct, frozen=True, kw_only=True):
    """Shards of one data set that have more in common than padding explains."""

    loader: LoaderOnRanks
    sentence: str
    cause: str
    remedy: str
    locations: tuple[Location, ...]
    """The sampler's line, where it is known, and the loader's."""
    shared: int
    """Samples that more than one rank draws."""
    left_out: int
    """Samples that no rank draws, beyond an incomplete rest."""


def overlapping_shards(record: RunRecord) -> Iterator[OverlappingShards]:
    """Yield the training loaders whose sampler divides by rank, but another order on each.

    Needs the whole lists. A sampler without a seed is judged only where the overlap is that of independent orders:
    repeated augmentation shares samples between ranks on purpose, and all of them.
    """
    wrong = {found.loader.loaders for found in wrong_sampler_ranks(record)}
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
            yield OverlappingShards(
                loader=loader,
                sentence=f"the shards of {rank_list(loader.ranks)} overlap: {drawn - union:,} of {total:,} samples are "
                f"drawn by more than one rank and {left_out:,} by none, as {cause}",
                cause=cause,
                remedy=remedy,
                locations=tuple(dict.fromkeys(known for known in (sampler, loader.location) if known is not None)),
                shared=drawn - union,
                left_out=left_out,
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
