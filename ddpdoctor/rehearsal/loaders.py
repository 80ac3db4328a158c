"""Short passes over every DataLoader, with the whole index list of the sampler in the record."""

from __future__ import annotations

import functools
import time
from array import array
from collections.abc import Iterator
from typing import Any, Optional

from ..probe.journal import Journal
from .division import described
from .ending import Ending
from .schedule import Schedule

MOST_INDICES = 8_000_000
MOST_DRAIN_S = 3.0
LISTS_KEPT = 6
"""Index lists are kept for so many passes of a process; later ones leave their digest only."""


class ShortPass:
    """An iterator over a loader that ends after a few batches; everything else it asks of the real one."""

    def __init__(self, loaders: Loaders, trail: Trail, inner: Iterator[Any]) -> None:
        self._loaders = loaders
        self._inner = inner
        self._trail = trail

    def __iter__(self) -> ShortPass:
        return self

    def __next__(self) -> Any:
        trail = self._trail
        if self._loaders.is_over(trail):
            self._loaders.finish(trail, self._inner, "cut")
            raise StopIteration
        try:
            batch = next(self._inner)
        except StopIteration:
            self._loaders.finish(trail, self._inner, "exhausted")
            raise
        trail.yielded += 1
        return batch

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __del__(self) -> None:
        try:
            self._loaders.finish(self._trail, self._inner, "abandoned")
        except Exception:
            return


class Trail:
    """What one pass has done so far."""

    def __init__(self, number: int, loader: int, journal: Journal) -> None:
        self.number = number
        self.loader = loader
        self.yielded = 0
        self.ended = False
        self.backwards_before = journal.backwards
        self.steps_before = journal.optimizer_steps


class Loaders:
    """Replaces the iteration and the length of ``DataLoader``."""

    def __init__(self, journal: Journal, schedule: Schedule, ending: Ending, torch: Any) -> None:
        self._journal = journal
        self._schedule = schedule
        self._ending = ending
        self._torch = torch
        self._ordinals: dict[int, int] = {}
        self._passes = 0
        self._made = 0
        self._cuts = 0
        self._joins = 0
        """Enabled `join()` contexts that are open."""
        self.newest = -1
        """Loader that was drawn from last."""

    def install(self) -> None:
        """Patch the class; subclasses that override nothing of it follow."""
        data = self._torch.utils.data
        loader_class = data.DataLoader
        loaders, journal = self, self._journal
        construct, iterate, length = loader_class.__init__, loader_class.__iter__, loader_class.__len__
        self._true_length = length

        @functools.wraps(construct)
        def __init__(loader: Any, *arguments: Any, **options: Any) -> None:
            construct(loader, *arguments, **options)
            if journal.rank is not None or journal.plan.get("spawns_ranks"):
                journal.guarded(loaders._note, loader, journal.here())

        @functools.wraps(iterate)
        def __iter__(loader: Any) -> Any:
            loaders._ending.check()
            site = journal.here()
            inner = iterate(loader)
            if not hasattr(loader, "_ddpdoctor_number"):
                return inner
            trail = journal.guarded(loaders.begin, loader, site)
            return inner if trail is None else ShortPass(loaders, trail, inner)

        @functools.wraps(length)
        def __len__(loader: Any) -> int:
            true = int(length(loader))
            if not hasattr(loader, "_ddpdoctor_number"):
                return true
            # Before the first pass schedules are made of it, which must last for the whole script.
            begun = loader._ddpdoctor_number in loaders._ordinals
            return min(true, loaders._schedule.batches(0, 0)) if begun else true

        loader_class.__init__, loader_class.__iter__, loader_class.__len__ = __init__, __iter__, __len__
        self._watch_indices(data.dataloader._BaseDataLoaderIter)
        self._watch_joins()

    def _watch_joins(self) -> None:
        """Count the open `join()` contexts: inside of one the ranks may draw different numbers of batches."""
        try:
            from torch.distributed.algorithms.join import Join
        except ImportError:
            return
        enter, leave, loaders = Join.__enter__, Join.__exit__, self

        @functools.wraps(enter)
        def __enter__(join: Any) -> Any:
            loaders._joins += bool(getattr(join, "_enable", True))
            return enter(join)

        @functools.wraps(leave)
        def __exit__(join: Any, *error: Any) -> Any:
            loaders._joins -= bool(getattr(join, "_enable", True))
            return leave(join, *error)

        Join.__enter__, Join.__exit__ = __enter__, __exit__

    def _watch_indices(self, iterator_class: Any) -> None:
        """Keep the indices that an iterator draws from its sampler, in the order in which it draws them."""
        draw, journal = iterator_class._next_index, self._journal

        @functools.wraps(draw)
        def _next_index(iterator: Any) -> Any:
            index = draw(iterator)
            if iterator._dataset_kind == 0:
                journal.guarded(keep, iterator, index)
            return index

        def keep(iterator: Any, index: Any) -> None:
            drawn = iterator.__dict__.setdefault("_ddpdoctor_drawn", array("q"))
            if len(drawn) < MOST_INDICES:
                drawn.extend(_integers(index))

        self._keep = keep
        iterator_class._next_index = _next_index

    def _note(self, loader: Any, site: int) -> None:
        """Write what is known of a loader at its construction."""
        number, self._made = self._made, self._made + 1
        sampler = sharding_sampler(loader)
        dataset = loader.dataset
        iterable = isinstance(dataset, self._torch.utils.data.IterableDataset)
        try:
            samples = None if iterable else len(dataset)
        except TypeError:
            samples = None
        self._journal.event(
            "loader",
            loader=number,
            site=site,
            dataset_type=type(dataset).__qualname__,
            dataset_length=samples,
            iterable=iterable,
            sampler_type=type(sampler or loader.sampler).__qualname__,
            sampler_shards=sampler is not None,
            sampler_shuffles=_shuffles(sampler or loader.sampler),
            batch_size=loader.batch_size,
            workers=loader.num_workers,
            drop_last=bool(getattr(loader, "drop_last", False)),
            length=self._length(loader),
            **described(sampler, dataset),
        )
        object.__setattr__(loader, "_ddpdoctor_number", number)

    def begin(self, loader: Any, site: int) -> Trail:
        """A pass begins."""
        number = loader._ddpdoctor_number
        ordinal = self._ordinals[number] = self._ordinals.get(number, -1) + 1
        self._passes += 1
        self._schedule.open_passes += 1
        trail = Trail(self._passes, number, self._journal)
        sampler = sharding_sampler(loader)
        self._journal.event(
            "pass_begun",
            number=trail.number,
            loader=number,
            ordinal=ordinal,
            site=site,
            set_epoch=getattr(sampler, "epoch", None) if sampler is not None else None,
            true_length=self._length(loader),
            joined=self._joins > 0,
        )
        return trail

    def is_over(self, trail: Trail) -> bool:
        """Tell whether the pass has yielded what it may; called before each batch."""
        self.newest = trail.loader
        self._ending.check()
        journal = self._journal
        limit = self._schedule.batches(
            journal.backwards - trail.backwards_before, journal.optimizer_steps - trail.steps_before
        )
        return trail.yielded >= limit

    def finish(self, trail: Trail, inner: Any, end: str) -> None:
        """A pass is over: read its sampler to the end, without its data, and note both."""
        if trail.ended:
            return
        trail.ended = True
        self._cuts += end == "cut"
        backwards = self._journal.backwards - trail.backwards_before
        fields: dict[str, Any] = {}
        if end != "abandoned":
            fields = self._journal.guarded(self._indices, inner, trail.number) or {}
        self._journal.event(
            "pass_ended", number=trail.number, yielded=trail.yielded, end=end, backwards=backwards, **fields
        )
        self._schedule.pass_ended(backwards)

    def caused(self, error: BaseException) -> bool:
        """Tell whether an exception is the end of a pass that we cut, seen by a bare ``next``."""
        ran_out = isinstance(error, StopIteration) or (
            isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration)
        )
        return ran_out and self._cuts > 0

    def _indices(self, inner: Any, number: int) -> dict[str, Any]:
        """Count, digest and file of the whole index list; empty when it has no end or no indices."""
        if getattr(inner, "_dataset_kind", 1) != 0 or not self._drain(inner):
            return {}
        drawn: array[int] = inner.__dict__.get("_ddpdoctor_drawn", array("q"))
        base = _base_indices(inner._dataset, drawn, self._torch)
        import hashlib

        digest = hashlib.blake2b(base.tobytes(), digest_size=8).hexdigest()
        name = self._journal.writer.write_indices(number, array("q", sorted(base))) if number <= LISTS_KEPT else ""
        return {"index_count": len(base), "index_digest": digest, "indices": name}

    def _drain(self, inner: Any) -> bool:
        """Draw the rest of the sampler's indices; False when there are too many of them."""
        started = time.monotonic()
        for count, index in enumerate(inner._sampler_iter):
            self._keep(inner, index)
            if count % 1024 == 0 and time.monotonic() - started > MOST_DRAIN_S:
                return False
            if len(inner.__dict__["_ddpdoctor_drawn"]) >= MOST_INDICES:
                return False
        return True

    def _length(self, loader: Any) -> Optional[int]:
        """The loader's true length; None when it has none."""
        try:
            return int(self._true_length(loader))
        except (TypeError, NotImplementedError):
            return None


def sharding_sampler(loader: Any) -> Any:
    """The sampler or batch sampler of a loader that knows ranks; None when there is none."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for candidate in (getattr(batch_sampler, "sampler", None), batch_sampler, getattr(loader, "sampler", None)):
        for replicas, rank in (("num_replicas", "rank"), ("num_processes", "process_index"), ("world_size", "rank")):
            if hasattr(candidate, replicas) and hasattr(candidate, rank):
                return candidate
    return None


def _shuffles(sampler: Any) -> bool:
    return bool(getattr(sampler, "shuffle", type(sampler).__name__ == "RandomSampler"))


def _integers(index: Any) -> list[int]:
    """An index or a batch of them as 64-bit integers; other keys by their hash."""
    if isinstance(index, (list, tuple)):
        return [number for item in index for number in _integers(item)]
    try:
        return [int(index)]
    except (TypeError, ValueError):
        import hashlib

        return [int.from_bytes(hashlib.blake2b(repr(index).encode(), digest_size=7).digest(), "big")]


def _base_indices(dataset: Any, drawn: array[int], torch: Any) -> array[int]:
    """Indices into the data set beneath any ``Subset``."""
    while isinstance(dataset, torch.utils.data.Subset):
        subset = dataset.indices
        drawn = array("q", [int(subset[index]) for index in drawn])
        dataset = dataset.dataset
    return drawn
