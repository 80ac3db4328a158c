"""Which loaders and passes of the ranks correspond to each other, and which of them feed training."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.diagnosis.wording import site_location
from ddpdoctor.finding import Location
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.data import Loader, Pass


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
    passes: dict[tuple[int, int], list[Pass]] = {}
    for entry in record.passes:
        passes.setdefault((entry.rank, entry.loader), []).append(entry)
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


def feeds_ddp(record: RunRecord, loader: Loader) -> bool:
    """Return whether batches of a loader went into a training forward of a DDP module on its rank."""
    return any(
        forward.rank == loader.rank
        and forward.pass_loader == loader.loader
        and forward.wrapped
        and forward.gradients
        and forward.training
        for forward in record.forwards
    )


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
