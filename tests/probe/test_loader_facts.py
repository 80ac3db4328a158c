from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from ddpdoctor.probe.facts.loaders import loader_facts

DATA = TensorDataset(torch.zeros(12, 1))


class Buckets(BatchSampler):  # type: ignore[misc]
    """Batches of other sizes than it was told."""


@pytest.mark.parametrize(
    ("loader", "size"),
    [
        (DataLoader(DATA, batch_size=3), 3),
        (DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 5, drop_last=True)), 5),
        (DataLoader(DATA, batch_sampler=Buckets(SequentialSampler(DATA), 5, drop_last=True)), None),
        (DataLoader(DATA, batch_size=None), None),
    ],
)
def test_the_size_of_a_batch_is_told_where_nothing_of_the_users_decides_it(
    loader: DataLoader[torch.Tensor], size: int | None
) -> None:
    assert loader_facts(loader, torch)["batch_size"] == size
