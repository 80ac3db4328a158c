"""Whether all ranks split a data set in the same way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ddpdoctor.diagnosis.training.pass_lengths import Comparison, compare_samples
from ddpdoctor.diagnosis.wording import rank_list, site_location
from ddpdoctor.finding import Location
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.setup import Part
from ddpdoctor.record.streams.training import Loader


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """A data set that every rank cut into parts which together are the whole, each sample in one part."""

    differs: bool
    """True: the parts hold other samples on another rank. False: the ranks have the same parts or other data."""
    sentence: str
    locations: tuple[Location, ...]
    """The lines that made the parts."""
    ranks: tuple[int, ...]
    counts: tuple[int, ...]
    """Samples of each part."""
    base_length: int
    different_parts: tuple[int, ...] = ()
    """Ordinals of the parts that differ."""


def judge_splits(record: RunRecord) -> Iterator[Split]:
    """Yield a verdict for each split that all ranks made at the same lines with parts of the same sizes.

    Nothing is said where it is not known whether the ranks split the same data.
    """
    ranks = record.rank_numbers()
    if len(ranks) < 2:
        return
    splits = [list(_wholes([part for part in record.parts if part.rank == rank])) for rank in ranks]
    for split in zip(*splits, strict=False):
        if len({tuple((part.site, part.count, part.base_type, part.base_length) for part in own) for own in split}) > 1:
            return
        verdict = _judge(record, ranks, split)
        if verdict is not None:
            yield verdict


def split_parts(record: RunRecord) -> frozenset[tuple[int, int]]:
    """Rank and ordinal of each part that belongs to a split of a whole data set."""
    found = set()
    for rank in record.rank_numbers():
        for own in _wholes([part for part in record.parts if part.rank == rank]):
            found |= {(rank, part.part) for part in own}
    return frozenset(found)


def _wholes(parts: Sequence[Part]) -> Iterator[tuple[Part, ...]]:
    """Runs of parts, made one after the other, that have each index of their data set once by number and sum."""
    run: list[Part] = []
    for part in sorted(parts, key=lambda entry: entry.part):
        if run and (part.base_type, part.base_length) != (run[0].base_type, run[0].base_length):
            run = []
        run.append(part)
        count, length = sum(entry.count for entry in run), part.base_length
        if count == length and sum(entry.index_sum for entry in run) == length * (length - 1) // 2:
            if len(run) > 1:
                yield tuple(run)
            run = []
        elif count >= length:
            run = []


def _judge(record: RunRecord, ranks: tuple[int, ...], split: Sequence[tuple[Part, ...]]) -> Split | None:
    first = split[0]
    different = tuple(number for number in range(len(first)) if len({own[number].digest for own in split}) > 1)
    places = (site_location(record.site(part.site)) for part in first)
    locations = tuple(dict.fromkeys(place for place in places if place is not None))
    counts = tuple(part.count for part in first)
    sizes = " and ".join((", ".join(f"{count:,}" for count in counts[:-1]), f"{counts[-1]:,}"))
    verdict = Split(
        differs=False,
        sentence=f"{rank_list(ranks)} split the {first[0].base_length:,} samples into the same parts of {sizes}",
        locations=locations,
        ranks=ranks,
        counts=counts,
        base_length=first[0].base_length,
    )
    if not different:
        return verdict
    data = _data(record, split)
    if data == "different":
        reason = "the ranks split different data: the samples behind equal indices differ between them"
        return msgspec.structs.replace(verdict, sentence=reason)
    if data != "same":
        return None
    return msgspec.structs.replace(
        verdict,
        differs=True,
        sentence=f"{rank_list(ranks)} split the {first[0].base_length:,} samples into parts of {sizes} differently: "
        "samples that one rank holds out are trained on by another",
        different_parts=different,
    )


def _data(record: RunRecord, split: Sequence[tuple[Part, ...]]) -> Comparison:
    """Compare the data beneath the parts, as the first loader showed that every rank made over one of them."""
    numbers = [{part.part: position for position, part in enumerate(own)} for own in split]
    for position in range(len(split[0])):
        loaders: list[Loader] = []
        for own, known in zip(split, numbers, strict=True):
            loaders += [
                loader
                for loader in record.loaders
                if loader.rank == own[0].rank and loader.part in known and known[loader.part] == position
            ][:1]
        comparison = compare_samples(loaders) if len(loaders) == len(split) else "unknown"
        if comparison in ("same", "different"):
            return comparison
    return "unknown"
