"""Training passes whose number of batches differs between the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from ddpdoctor.diagnosis.wording import count, rank_list, site_location, verb
from ddpdoctor.finding import Location, grouped
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.training import Loader, Pass

# Which loaders and passes of the ranks correspond to each other, and which of them feed training.


class LoaderOnRanks(msgspec.Struct, frozen=True, kw_only=True):
    """One DataLoader of the script, as every rank made it."""

    loaders: tuple[Loader, ...]
    """By rank, one for each rank of the record."""
    passes: tuple[tuple[Pass, ...], ...]
    """The same order; the passes of each rank by ordinal."""
    location: Location | None
    """The line that made it."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, ascending."""
        return tuple(loader.rank for loader in self.loaders)

    def pass_places(self) -> Iterator[tuple[Pass, ...]]:
        """Yield the n-th pass of all ranks, as long as each has one."""
        yield from zip(*self.passes, strict=False)


def loaders_on_all_ranks(record: RunRecord) -> Iterator[LoaderOnRanks]:
    """Yield the loaders that every rank made at the same line, in the order of their making.

    The n-th loader made by a call chain on one rank corresponds to the n-th made there on the others.
    """
    ranks = record.rank_numbers()
    if len(ranks) < 2:
        return
    passes = grouped(record.passes, lambda entry: (entry.rank, entry.loader))
    places: dict[tuple[int, int], dict[int, Loader]] = {}
    made: dict[tuple[int, int], int] = {}
    for loader in sorted(record.loaders, key=lambda entry: (entry.rank, entry.loader)):
        ordinal = made.get((loader.rank, loader.site), 0)
        made[loader.rank, loader.site] = ordinal + 1
        places.setdefault((loader.site, ordinal), {})[loader.rank] = loader
    for (site, _), by_rank in places.items():
        if sorted(by_rank) != list(ranks):
            continue
        loaders = tuple(by_rank[rank] for rank in ranks)
        yield LoaderOnRanks(
            loaders=loaders,
            passes=tuple(
                tuple(sorted(passes.get((loader.rank, loader.loader), ()), key=lambda entry: entry.ordinal))
                for loader in loaders
            ),
            location=site_location(record.site(site)),
        )


def trains_on_own_data(record: RunRecord) -> bool:
    """Return whether ranks train one model, each on data of its own: by DDP, or one that is sharded over all ranks.

    Where some ranks only share a module, others may be fed as they are, as by tensor parallelism.
    """
    everyone = len(record.rank_numbers())
    return bool(record.wraps) or any(len(one.ranks) == everyone for one in record.sharded_modules)


def feeds_ddp(record: RunRecord, loader: Loader) -> bool:
    """Return whether batches of a loader went into a training forward of a DDP or sharded module on its rank."""
    at = loader.rank, loader.loader
    return any((forward.rank, forward.pass_loader) == at and forward.trains for forward in record.forwards)


def training_loader(record: RunRecord) -> Loader | None:
    """Return the loader whose batches the first rank trained on most, or the only one that it made; None if neither."""
    first = min((loader.rank for loader in record.loaders), default=None)
    own = [loader for loader in record.loaders if loader.rank == first]
    backwards: dict[int, int] = {}
    for entry in record.passes:
        if entry.rank == first and entry.backwards:
            backwards[entry.loader] = backwards.get(entry.loader, 0) + entry.backwards
    if backwards:
        most = max(backwards, key=lambda loader: backwards[loader])
        return next((loader for loader in own if loader.loader == most), None)
    return own[0] if len(own) == 1 else None


# Batches that some ranks trained on and another passed over, in one pass of a `for` statement.

_MOST_FORWARDS = 4_000
"""A rank notes no more forwards than that, so that a later batch only seems to have none."""


class SkippedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One batch that did not go through the DDP model on every rank."""

    ordinal: int
    """n-th pass of the loader, from 0."""
    batch: int
    """Position in the pass, from 0."""
    skipped_on: tuple[int, ...]
    trained_on: tuple[int, ...]
    locations: tuple[Location, ...]
    """The line that iterates over the loader, if it is known."""

    @property
    def named(self) -> tuple[int, ...]:
        """The rank that skipped, if it was one alone among those that trained; otherwise both sides."""
        return self.skipped_on if len(self.skipped_on) == 1 else tuple(sorted(self.skipped_on + self.trained_on))

    @property
    def sentence(self) -> str:
        """Who skipped what, in words."""
        skipped, trained = rank_list(self.skipped_on), rank_list(self.trained_on)
        return (
            f"{skipped} {verb(self.skipped_on, 'runs', 'run')} no forward of the DDP model for batch {self.batch} of "
            f"pass {self.ordinal}, {trained} {verb(self.trained_on, 'does', 'do')}"
        )


def skipped_batches(record: RunRecord) -> Iterator[SkippedBatch]:
    """Yield the batches that some ranks skipped, in the order of the passes.

    Only where every batch is drawn by a ``for`` statement: a loop that draws with ``next`` may legally draw another.
    """
    by_batch: dict[tuple[int, int, int], set[int]] = {}
    looped: dict[tuple[int, int, int], bool] = {}
    counts: dict[int, int] = {}
    for forward in record.forwards:
        counts[forward.rank] = counts.get(forward.rank, 0) + 1
        if forward.trains and forward.pass_loader >= 0:
            key = (forward.rank, forward.pass_loader, forward.pass_ordinal)
            by_batch.setdefault(key, set()).add(forward.batch)
            looped[key] = looped.get(key, True) and forward.looped
    if max(counts.values(), default=0) >= _MOST_FORWARDS:
        return
    for loader in loaders_on_all_ranks(record):
        for entries in loader.pass_places():
            keys = [(entry.rank, entry.loader, entry.ordinal) for entry in entries]
            if all(looped.get(key, False) for key in keys) and not any(entry.joined for entry in entries):
                yield from _of_pass(record, loader, entries, [by_batch[key] for key in keys])


def _of_pass(
    record: RunRecord, loader: LoaderOnRanks, entries: tuple[Pass, ...], batches: list[set[int]]
) -> Iterator[SkippedBatch]:
    # A rank is done with the batches before the last that it trained on, and with all of a pass that was drawn dry.
    done = [
        max(max(own), entry.yielded - 1 if entry.end in ("exhausted", "cut") else 0)
        for entry, own in zip(entries, batches, strict=True)
    ]
    line = site_location(record.site(entries[0].site))
    for batch in range(min(done) + 1):
        trained = tuple(rank for rank, own in zip(loader.ranks, batches, strict=True) if batch in own)
        skipped = tuple(rank for rank, own in zip(loader.ranks, batches, strict=True) if batch not in own)
        if trained and skipped:
            yield SkippedBatch(
                ordinal=entries[0].ordinal,
                batch=batch,
                skipped_on=skipped,
                trained_on=trained,
                locations=() if line is None else (line,),
            )


# Whether the data behind equal indices are the same on all ranks.

Comparison = Literal["same", "different", "meaningless", "unknown"]


def compare_samples(loaders: Sequence[Loader]) -> Comparison:
    """Compare the samples that were fetched by index, under the same seed, on every rank.

    Only informative leaves count: those that differ between the probed indices although the seed is the same, so that
    augmentation at random does no harm and batches made of random numbers alone prove nothing. ``meaningless``: the
    index does not determine the data. ``unknown``: nothing comparable was fetched.
    """
    probes = [{probe.index: probe for probe in loader.samples} for loader in loaders]
    common = sorted(set.intersection(*(set(found) for found in probes))) if probes else []
    if len(common) < 2:
        return "unknown"
    widths = {len(found[index].leaves) for found in probes for index in common}
    if len(widths) != 1:
        return "unknown"
    informative = [
        {leaf for leaf in range(max(widths)) if len({found[index].leaves[leaf] for index in common}) > 1}
        for found in probes
    ]
    leaves = set.intersection(*informative)
    if not leaves:
        return "different" if any(informative) else "meaningless"
    agreements = {all(len({found[index].leaves[leaf] for found in probes}) == 1 for index in common) for leaf in leaves}
    if agreements == {True}:
        return "same"
    return "different" if agreements == {False} else "unknown"


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
    samples: int = 0
    """Of each rank, where all have as many, and a sampler puts them into other numbers of batches; 0 where not."""

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
    """Yield the first uneven training pass of each loader that feeds such a module, outside `join()`.

    Passes that the script left by itself, unless by its rank's own length, say nothing, and neither does a loader that
    every rank started anew in the middle of training without harm (a loop over steps, not over the loader);
    ``one_left`` tells that it did harm, as a rank ran to its end before the others.
    """
    if not trains_on_own_data(record):
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
    known = [(entry, length) for entry, length in zip(entries, lengths, strict=True) if length is not None]
    shortest, longest = min(length for _, length in known), max(length for _, length in known)
    short = [entry for entry, length in known if length == shortest]
    ended = any(entry.end == "exhausted" or (entry.by_length and entry.yielded == shortest) for entry in short)
    ahead = any(entry.yielded > shortest for entry, length in known if length == longest)
    return UnevenPass(
        ordinal=entries[0].ordinal,
        lengths=tuple((entry.rank, length) for entry, length in known),
        location=loader.location,
        overrun=ended and ahead,
        samples=(_samples(entries) // len(entries)) if all(one.batch_count for one in entries) else 0,
    )


def _length(entry: Pass) -> int | None:
    if entry.batch_count is not None:
        return entry.batch_count  # A sampler of the script's own may have no length, or one that it does not keep to.
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
