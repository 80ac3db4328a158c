"""The whole index list of a pass that was cut: what its sampler would have drawn, read without the data."""

from __future__ import annotations

import functools
import time
from array import array
from typing import Any

from ...facts.index_lists import base_indices, digest_of, integers
from ...journal import Journal

MOST_INDICES = 8_000_000
MOST_DRAIN_S = 3.0
WIDEST = 4
"""A sampler that draws more than so many times the data set has no end."""
LISTS_KEPT = 3
"""Lists are read for so many passes of a loader; later epochs show nothing new."""


class Indices:
    """The indices that the iterators of loaders draw from their samplers."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        self._journal = journal
        self._torch = torch
        self._endless: set[int] = set()
        """Loaders whose sampler is not read to its end."""
        self._wide: set[int] = set()
        """Those of them whose sampler has none, as far as it was read."""

    def install(self) -> None:
        """Keep the indices that an iterator draws from its sampler, in the order in which it draws them."""
        iterator_class = self._torch.utils.data.dataloader._BaseDataLoaderIter
        draw, restart, journal = iterator_class._next_index, iterator_class._reset, self._journal

        @functools.wraps(draw)
        def _next_index(iterator: Any) -> Any:
            index = draw(iterator)
            if iterator._dataset_kind == 0:
                journal.guarded(self._keep, iterator, index, harms=("passes",))
            return index

        @functools.wraps(restart)
        def _reset(iterator: Any, *arguments: Any, **options: Any) -> Any:
            # Persistent workers serve all passes with one iterator.
            iterator.__dict__.pop("_ddpdoctor_drawn", None)
            return restart(iterator, *arguments, **options)

        iterator_class._next_index, iterator_class._reset = _next_index, _reset

    def whole(self, iterator: Any, loader: int, ordinal: int, number: int) -> dict[str, Any]:
        """Return count, digest and file of the whole index list; empty when it has no end or no indices."""
        if ordinal >= LISTS_KEPT or loader in self._endless or getattr(iterator, "_dataset_kind", 1) != 0:
            return {}
        if not self._drain(iterator):
            self._endless.add(loader)
            if len(iterator.__dict__["_ddpdoctor_drawn"]) >= self._most(iterator):
                self._wide.add(loader)
            return {}
        drawn: array[int] = iterator.__dict__.get("_ddpdoctor_drawn", array("q"))
        base = base_indices(iterator._dataset, drawn, self._torch)
        name = self._journal.writer.write_indices(number, array("q", sorted(base)))
        return {"index_count": len(base), "index_digest": digest_of(base), "indices": name}

    def have_no_end(self, loader: int) -> bool:
        """Return whether a loader's sampler drew so much more than its data set that its passes have no end."""
        return loader in self._wide

    def _keep(self, iterator: Any, index: Any) -> None:
        drawn = iterator.__dict__.setdefault("_ddpdoctor_drawn", array("q"))
        if len(drawn) < MOST_INDICES:
            drawn.extend(integers(index))

    def _drain(self, iterator: Any) -> bool:
        """Draw the rest of the sampler's indices; False when there are too many, or the ranks draw them together."""
        started, most = time.monotonic(), self._most(iterator)
        ring = self._journal.ring
        collectives = ring.count if ring is not None else 0
        for count, index in enumerate(iterator._sampler_iter):
            self._keep(iterator, index)
            if count % 1024 == 0 and time.monotonic() - started > MOST_DRAIN_S:
                return False
            if len(iterator.__dict__["_ddpdoctor_drawn"]) >= most:
                return False
            if ring is not None and ring.count != collectives:
                return False
        return True

    def _most(self, iterator: Any) -> int:
        try:
            return min(MOST_INDICES, WIDEST * len(iterator._dataset) + 1024)
        except TypeError:
            return MOST_INDICES
