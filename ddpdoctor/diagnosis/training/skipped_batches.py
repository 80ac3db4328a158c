"""Batches that some ranks trained on and another passed over, in one pass of a ``for`` statement."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.diagnosis.training.loaders import LoaderOnRanks, loaders_on_all_ranks
from ddpdoctor.diagnosis.wording import rank_list, site_location, verb
from ddpdoctor.finding import Location
from ddpdoctor.record.model import Forward, RunRecord
from ddpdoctor.record.streams.data import Pass

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
        if _trains(forward):
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


def _trains(forward: Forward) -> bool:
    return forward.wrapped and forward.gradients and forward.training and forward.pass_loader >= 0


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
