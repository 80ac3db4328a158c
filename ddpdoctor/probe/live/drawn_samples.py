"""Takes a few samples, known by their index, out of the batches that a loader hands out, so that ranks can be compared.

The data set is not asked for anything: in a live run fetching a sample twice could change what the job sees.
"""

from __future__ import annotations

from array import array
from typing import Any, Optional

from ..facts.digests import leaves
from ..facts.index_lists import base_indices
from ..journal import Journal


def places_of(length: int) -> frozenset[int]:
    """The indices whose samples are told of."""
    return frozenset({0, 1, length // 2, length - 1})


def note_samples(journal: Journal, torch: Any, dataset: Any, indices: array[int], batch: Any) -> None:
    """Tell of the samples in a batch that every rank tells of; nothing where its rows are not its samples."""
    length = len(dataset)
    wanted = places_of(length)
    if wanted.isdisjoint(indices):
        return
    columns = _columns(batch, len(indices), torch)
    if not columns:
        return
    for row, index in enumerate(indices):
        if index in wanted:
            journal.event(
                "sample",
                dataset_type=type(dataset).__qualname__,
                dataset_length=length,
                index=int(base_indices(dataset, array("q", [index]), torch)[0]),
                leaves=leaves([column[row] for column in columns], torch),
            )


def _columns(batch: Any, rows: int, torch: Any) -> Optional[list[Any]]:
    """The tensors of a batch; None when one of them does not have a row for each sample."""
    if isinstance(batch, torch.Tensor):
        return [batch] if batch.dim() and batch.shape[0] == rows else None
    if isinstance(batch, dict):
        batch = [batch[key] for key in sorted(batch, key=str)]
    if not isinstance(batch, (list, tuple)):
        return None
    found: list[Any] = []
    for part in batch:
        columns = _columns(part, rows, torch)
        if columns is None:
            return None
        found.extend(columns)
    return found
