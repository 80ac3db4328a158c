"""Whether samplers were told the ranks that draw from them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.diagnosis.training.loaders import LoaderOnRanks, loaders_on_all_ranks
from ddpdoctor.diagnosis.wording import rank_list, site_location, verb
from ddpdoctor.finding import Location
from ddpdoctor.record.model import RunRecord


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
