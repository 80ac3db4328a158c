"""Smaller batches, made where their samples are fetched: lengths, samplers and their index lists stay as they are."""

from __future__ import annotations

import functools
from typing import Any


def cut_batches(torch: Any, samples: int) -> None:
    """Make every loader that collates fetch at most so many samples for a batch, in workers too."""
    fetchers = torch.utils.data._utils.fetch
    for fetcher_class in (fetchers._MapDatasetFetcher, fetchers._IterableDatasetFetcher):
        fetcher_class.fetch = _fetch_less(fetcher_class.fetch, samples)


def _fetch_less(fetch: Any, samples: int) -> Any:
    @functools.wraps(fetch)
    def fetch_less(fetcher: Any, index: Any) -> Any:
        if fetcher.auto_collation and isinstance(index, (list, tuple)) and len(index) > samples:
            index = index[:samples]
        return fetch(fetcher, index)

    return fetch_less
