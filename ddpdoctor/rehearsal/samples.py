"""Fetches a few samples twice, under two fixed seeds, so that the ranks' data can be compared sample by sample.

It happens right after the first batch, in the process that fetches (a worker's or the rank's own), with every random
state put back as it was.
"""

from __future__ import annotations

import functools
import random
import sys
import time
from typing import Any

from ..probe.journal import Journal
from .digests import leaves

SEEDS = (20_011, 40_013)
MOST_S = 1.0


class Samples:
    """Replaces the fetch of map-style data sets once per data set and process."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        self._journal = journal
        self._torch = torch
        self._probed: set[int] = set()

    def install(self) -> None:
        """Patch the fetcher that main process and workers share."""
        fetcher_class = self._torch.utils.data._utils.fetch._MapDatasetFetcher
        fetch = fetcher_class.fetch

        @functools.wraps(fetch)
        def fetch_and_probe(fetcher: Any, index: Any) -> Any:
            batch = fetch(fetcher, index)
            if id(fetcher.dataset) not in self._probed:
                self._probed.add(id(fetcher.dataset))
                self._probe(fetcher.dataset)
            return batch

        fetcher_class.fetch = fetch_and_probe

    def _probe(self, dataset: Any) -> None:
        try:
            length = len(dataset)
        except TypeError:
            return
        started = time.monotonic()
        states = self._states()
        try:
            for index in sorted({0, length // 3, length // 2, length - 1}):
                first, second = (self._leaves_under(seed, dataset, index) for seed in SEEDS)
                self._journal.event(
                    "sample",
                    dataset_type=type(dataset).__qualname__,
                    dataset_length=length,
                    index=self._base_index(dataset, index),
                    first=first,
                    second=second,
                )
                if time.monotonic() - started > MOST_S:
                    break
        except Exception as error:
            self._journal.event("probe_fault", where="samples", text=repr(error))
        finally:
            self._put_back(states)

    def _leaves_under(self, seed: int, dataset: Any, index: int) -> tuple[str, ...]:
        self._torch.default_generator.manual_seed(seed)
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed)
        return leaves(dataset[index], self._torch)

    def _states(self) -> tuple[Any, Any, Any]:
        numpy = sys.modules.get("numpy")
        return (
            self._torch.default_generator.get_state(),
            random.getstate(),
            numpy.random.get_state() if numpy is not None else None,
        )

    def _put_back(self, states: tuple[Any, Any, Any]) -> None:
        self._torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        numpy = sys.modules.get("numpy")
        if numpy is not None and states[2] is not None:
            numpy.random.set_state(states[2])

    def _base_index(self, dataset: Any, index: int) -> int:
        while isinstance(dataset, self._torch.utils.data.Subset):
            index = int(dataset.indices[index])
            dataset = dataset.dataset
        return index
