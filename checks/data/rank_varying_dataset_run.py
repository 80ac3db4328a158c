"""Whether the data sets that samplers divide between the ranks are the same on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from ddpdoctor.checks.data.splits_run import split_parts
from ddpdoctor.diagnosis.training.pass_lengths import (
    LoaderOnRanks,
    compare_samples,
    loaders_on_all_ranks,
    uneven_passes,
)
from ddpdoctor.diagnosis.wording import rank_list, site_location
from ddpdoctor.finding import Location
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.setup import Part
from ddpdoctor.record.streams.training import Loader


class RankData(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one data set under a sampler that shards it between all ranks."""

    varies: bool
    sentence: str
    locations: tuple[Location, ...]
    """The sampler's line, where it is known, and the loader's."""
    ranks: tuple[int, ...]
    facts: tuple[str, ...] = ()
    numbers: Mapping[str, int | float] = {}
    remedy: str = ""


def judge_rank_data(record: RunRecord) -> Iterator[RankData]:
    """Yield a verdict for each loader whose sampler takes all ranks for the parts of one data set.

    Data that merely differ (made up at random on each rank) are left out: only another length, another order of the
    same rows, and a subset that was divided before are proofs that the sampler's division goes wrong.
    """
    uneven = {entry.location for entry in uneven_passes(record)}
    for loader in loaders_on_all_ranks(record):
        own = loader.loaders
        if not all(entry.sampler_shards and entry.sampler_replicas == len(own) for entry in own):
            continue
        if loader.location in uneven:
            continue
        verdict = _lengths(record, loader) or _divided_before(record, loader) or _order(record, loader)
        if verdict is not None:
            yield verdict


def _places(record: RunRecord, loader: LoaderOnRanks) -> tuple[Location, ...]:
    sampler = site_location(record.site(loader.loaders[0].sampler_site))
    return tuple(dict.fromkeys(place for place in (sampler, loader.location) if place is not None))


def _lengths(record: RunRecord, loader: LoaderOnRanks) -> RankData | None:
    lengths = {entry.rank: entry.dataset_length for entry in loader.loaders}
    if None in lengths.values() or len(set(lengths.values())) == 1:
        return None
    kind = loader.loaders[0].dataset_type
    return RankData(
        varies=True,
        sentence=f"{loader.loaders[0].sampler_type} divides a {kind} whose length differs between ranks",
        locations=_places(record, loader),
        ranks=loader.ranks,
        facts=tuple(f"on rank {rank} it has {length:,} samples" for rank, length in lengths.items()),
        remedy="Build the same data set on every rank, and leave the division to the sampler.",
    )


def _divided_before(record: RunRecord, loader: LoaderOnRanks) -> RankData | None:
    parts = [_part(record, entry) for entry in loader.loaders]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or len({part.digest for part in known}) == 1:
        return None
    if split_parts(record) & {(part.rank, part.part) for part in known}:
        return None
    drawn: set[int] = set()
    for passes in loader.passes:
        trained = next((entry for entry in passes if entry.indices), None)
        if trained is None:
            return None
        drawn |= set(trained.indices)
    total = known[0].base_length
    return RankData(
        varies=True,
        sentence=f"{loader.loaders[0].sampler_type} divides a subset that differs between the ranks: together they "
        f"draw {len(drawn):,} of {total:,} samples",
        locations=_places(record, loader),
        ranks=loader.ranks,
        facts=tuple(
            f"the subset of rank {part.rank} holds {part.count:,} of {total:,} samples, different ones from those of "
            f"rank {known[0].rank}"
            for part in known[1:3]
            if part.digest != known[0].digest
        ),
        numbers={"samples_drawn": len(drawn), "samples": total, "ranks": len(known)},
        remedy="Divide once: give the sampler the whole data set, which it divides in parts of one length.",
    )


def _order(record: RunRecord, loader: LoaderOnRanks) -> RankData | None:
    holdings = [_holdings(record, entry) for entry in loader.loaders]
    names = set.intersection(*(set(found) for found in holdings)) if holdings else set()
    if compare_samples(loader.loaders) == "same":
        if not names or any(len({held[name][0] for held in holdings}) > 1 for name in names):
            return None
        return RankData(
            varies=False,
            sentence="the samples behind equal indices are the same on all ranks",
            locations=_places(record, loader),
            ranks=loader.ranks,
        )
    for name in sorted(names):
        found = [held[name] for held in holdings]
        if len({ordered for ordered, _ in found}) > 1 and len({unordered for _, unordered in found}) == 1:
            kind = loader.loaders[0].dataset_type
            return RankData(
                varies=True,
                sentence=(
                    f"{loader.loaders[0].sampler_type} divides a {kind} whose order of samples differs between ranks"
                ),
                locations=_places(record, loader),
                ranks=loader.ranks,
                facts=(f"`{name}` holds the same rows on {rank_list(loader.ranks)}, in different orders",),
                remedy="Seed every rank with the same number before the data set is built, or leave the shuffling to "
                "the sampler.",
            )
    return None


def _part(record: RunRecord, loader: Loader) -> Part | None:
    return next((part for part in record.parts if (part.rank, part.part) == (loader.rank, loader.part)), None)


def _holdings(record: RunRecord, loader: Loader) -> dict[str, tuple[str, str]]:
    """Return what the innermost data set of a loader holds: attribute -> ordered and unordered digest."""
    part = _part(record, loader)
    kind, length = (loader.dataset_type, loader.dataset_length) if part is None else (part.base_type, part.base_length)
    return {
        held.attribute: (held.ordered_digest, held.unordered_digest)
        for held in record.holdings
        if (held.rank, held.dataset_type, held.dataset_length) == (loader.rank, kind, length)
    }
