"""Training passes whose number of batches differs between the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.diagnosis.training.loaders import LoaderOnRanks, loaders_on_all_ranks
from ddpdoctor.diagnosis.wording import count, rank_list, verb
from ddpdoctor.finding import Location
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.data import Pass

_MANY_RANKS = 8
"""What divides by it divides by 2 and by 4 ranks, too."""


class UnevenPass(msgspec.Struct, frozen=True, kw_only=True):
    """A pass that is longer on some ranks than on others."""

    ordinal: int
    """n-th pass of the loader, from 0."""
    lengths: tuple[tuple[int, int], ...]
    """Rank and batches of the whole pass, by rank."""
    location: Location | None
    """The line that made the loader."""
    overrun: bool
    """A shorter rank used up its pass while a longer one continued to batches that the shorter never had."""

    @property
    def sentence(self) -> str:
        """The lengths in words."""
        by_length: dict[int, list[int]] = {}
        for rank, length in self.lengths:
            by_length.setdefault(length, []).append(rank)
        parts = [
            f"{rank_list(ranks)} {verb(ranks, 'gets', 'get')} {count(length, 'batch', 'batches')}"
            for length, ranks in sorted(by_length.items())
        ]
        shown = parts if len(parts) <= 4 else [*parts[:3], f"others between {min(by_length):,} and {max(by_length):,}"]
        return f"the ranks' training passes differ in length: {', '.join(shown)}"


def uneven_passes(record: RunRecord, *, one_left: bool = False) -> Iterator[UnevenPass]:
    """Yield the first uneven training pass of each loader that feeds a DDP module, outside `join()`.

    Passes that the script left by itself, unless by its rank's own length, say nothing, and neither does a loader that
    every rank started anew in the middle of training without harm (a loop over steps, not over the loader);
    ``one_left`` tells that it did harm, as a rank ran to its end before the others.
    """
    if not record.wraps:
        return
    for loader in loaders_on_all_ranks(record):
        uneven = next(filter(None, (_uneven(entries, loader) for entries in loader.pass_places())), None)
        if uneven is not None and not (uneven.overrun and not one_left and _survived(loader, uneven)):
            yield uneven


def even_divisions(record: RunRecord) -> Iterator[tuple[Location, int]]:
    """Yield the places of training loaders of which every pass gave the ranks equally many samples, with their number.

    Only numbers that divide evenly by 2, 4 and 8 ranks as well: the job may have more ranks than this run.
    """
    by_place: dict[Location, list[int]] = {}
    for loader in loaders_on_all_ranks(record):
        if loader.location is None:
            continue
        for entries in loader.pass_places():
            if any(entry.backwards for entry in entries):
                by_place.setdefault(loader.location, []).append(_samples(entries))
    for location, samples in by_place.items():
        if all(number and number % _MANY_RANKS == 0 for number in samples):
            yield location, samples[0]


def _samples(entries: tuple[Pass, ...]) -> int:
    """Return the samples of a pass over all ranks; 0 when it is not known or differs between them."""
    counts = {entry.index_count for entry in entries}
    own = counts.pop() if len(counts) == 1 else None
    return own * len(entries) if own else 0


def _uneven(entries: tuple[Pass, ...], loader: LoaderOnRanks) -> UnevenPass | None:
    if not any(entry.backwards for entry in entries) or any(entry.joined for entry in entries):
        return None
    lengths = [_length(entry) for entry in entries]
    left = all(entry.end in ("abandoned", "counted") for entry in entries)
    if None in lengths or len(set(lengths)) == 1 or (left and not all(entry.by_length for entry in entries)):
        return None
    known = [length for length in lengths if length is not None]
    shortest, longest = min(known), max(known)
    ended = any(
        entry.end == "exhausted" or (entry.by_length and entry.yielded == shortest)
        for entry, length in zip(entries, known, strict=True)
        if length == shortest
    )
    ahead = any(entry.yielded > shortest for entry, length in zip(entries, known, strict=True) if length == longest)
    return UnevenPass(
        ordinal=entries[0].ordinal,
        lengths=tuple((entry.rank, length) for entry, length in zip(entries, known, strict=True)),
        location=loader.location,
        overrun=ended and ahead,
    )


def _length(entry: Pass) -> int | None:
    if entry.true_length is not None:
        return entry.true_length
    return entry.yielded if entry.end == "exhausted" else None


def _survived(loader: LoaderOnRanks, uneven: UnevenPass) -> bool:
    """Return whether every rank used up the uneven pass and then trained on a further one."""
    later = [
        [entry for entry in passes if entry.ordinal > uneven.ordinal and entry.backwards] for passes in loader.passes
    ]
    own = [entry for passes in loader.passes for entry in passes if entry.ordinal == uneven.ordinal]
    return all(later) and all(entry.end == "exhausted" for entry in own)
