"""The indices that samplers draw, as numbers that can be written and compared."""

from __future__ import annotations

import hashlib
from array import array
from typing import Any


def integers(index: Any) -> list[int]:
    """Return an index or a batch of them as 64-bit integers; other keys by their hash."""
    if isinstance(index, (list, tuple)):
        return [number for item in index for number in integers(item)]
    try:
        return [int(index)]
    except (TypeError, ValueError):
        return [int.from_bytes(hashlib.blake2b(repr(index).encode(), digest_size=7).digest(), "big")]


def base_indices(dataset: Any, drawn: array[int], torch: Any) -> array[int]:
    """Return the indices in the data set beneath any ``Subset``."""
    while isinstance(dataset, torch.utils.data.Subset):
        subset = dataset.indices
        drawn = array("q", [int(subset[index]) for index in drawn])
        dataset = dataset.dataset
    return drawn


def digest_of(indices: array[int]) -> str:
    """Return a digest of a list of indices, in its order."""
    return hashlib.blake2b(indices.tobytes(), digest_size=8).hexdigest()
