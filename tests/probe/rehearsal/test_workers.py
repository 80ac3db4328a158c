"""Workers are few in a rehearsal, above all spawned ones, and the script reads what it has set."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ddpdoctor.probe.rehearsal.data.loaders import few_workers

DATA = TensorDataset(torch.zeros(8, 1))


class Stream(IterableDataset[int]):  # type: ignore[misc]
    """Divides itself among its workers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("data", "method", "workers", "meanwhile"),
    [
        (DATA, "spawn", 2, 1),
        (DATA, "forkserver", 2, 1),
        (DATA, "fork", 2, 2),
        (DATA, "fork", 32, 4),
        (DATA, "spawn", 1, 1),
        (Stream(), "spawn", 2, 2),
        (Stream(), "fork", 32, 32),
    ],
)
def test_a_pass_starts_no_more_workers_than_have_something_to_do(
    data: TensorDataset | Stream, method: str, workers: int, meanwhile: int
) -> None:
    context = multiprocessing.get_context(method)
    loader: DataLoader[object] = DataLoader(data, num_workers=workers, multiprocessing_context=context)
    with few_workers(loader, torch):
        assert loader.num_workers == meanwhile
    assert loader.num_workers == workers


def _prepare(worker: int) -> None:
    """What a script does in its workers."""


@pytest.mark.parametrize(
    ("method", "options", "meanwhile"),
    [
        ("spawn", {}, 0),
        ("fork", {}, 2),
        ("spawn", {"worker_init_fn": _prepare}, 1),
        ("spawn", {"persistent_workers": True}, 1),
        ("spawn", {"timeout": 30}, 1),
    ],
)
def test_workers_that_were_seen_are_not_spawned_again_unless_the_script_prepares_them(
    method: str, options: dict[str, Any], meanwhile: int
) -> None:
    context = multiprocessing.get_context(method)
    loader: DataLoader[object] = DataLoader(DATA, num_workers=2, multiprocessing_context=context, **options)
    with few_workers(loader, torch, seen=True) as workers:
        assert loader.num_workers == workers == meanwhile
    assert loader.num_workers == 2
