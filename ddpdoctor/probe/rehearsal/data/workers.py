"""Fewer workers for the few batches of a rehearsal, where each takes long to start."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from typing import Any

AT_MOST_SPAWNED = 1
"""Workers of a pass that yields a few batches. In a rank that ``mp.spawn`` started a worker is no fork, but a Python of
its own that imports the script and torch again: 2 ranks with 4 workers took 110 s on two cores before the first batch.
One worker still shows what cannot be pickled; started for each of the passes of torch's ImageNet example, it took 32 of
82 s of CPU."""
AT_MOST_FORKED = 4
"""The batches of a pass that is cut: further workers (a public script has 32 for each rank) would have none to make."""


@contextlib.contextmanager
def few_workers(loader: Any, torch: Any, *, seen: bool = False) -> Iterator[int]:
    """Make the iterator that is made meanwhile start few workers, and fewer where they are spawned; yield how many.

    With ``seen`` a pass of such a loader had workers already: they are not spawned again, and the rank fetches, unless
    the script prepares them. A data set that divides itself among its workers keeps them all. The script reads its own.
    """
    asked = loader.num_workers
    divides = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    at_most = AT_MOST_FORKED
    if _spawns(loader):
        at_most = 0 if seen and _does_without(loader) else AT_MOST_SPAWNED
    if asked <= at_most or divides:
        yield asked
        return
    loader.num_workers = at_most
    try:
        yield at_most
    finally:
        loader.num_workers = asked


def _does_without(loader: Any) -> bool:
    """Return whether a rank that fetches by itself fetches the same: no worker is prepared, kept or watched."""
    return loader.worker_init_fn is None and not loader.persistent_workers and not loader.timeout


def _spawns(loader: Any) -> bool:
    """Return whether the workers of a loader are started anew, and not forked."""
    context = loader.multiprocessing_context
    method = multiprocessing.get_start_method(allow_none=True) if context is None else context.get_start_method()
    return method in ("spawn", "forkserver")
