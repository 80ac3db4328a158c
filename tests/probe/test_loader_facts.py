from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, SequentialSampler, TensorDataset

from ddpdoctor.probe.observed import loader_facts

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


def test_a_batch_sampler_is_named_by_its_class_and_torchs_own_by_what_it_draws_from() -> None:
    by_class = loader_facts(DataLoader(DATA, batch_sampler=Buckets(SequentialSampler(DATA), 5, drop_last=True)), torch)
    assert (by_class["sampler_type"], by_class["own_batches"]) == ("Buckets", True)
    plain = loader_facts(
        DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 5, drop_last=True)), torch
    )
    assert (plain["sampler_type"], plain["own_batches"]) == ("SequentialSampler", True)
    assert not loader_facts(DataLoader(DATA, batch_size=3), torch)["own_batches"]


class Shard(BatchSampler):  # type: ignore[misc]
    """Every n-th batch of another batch sampler, as Accelerate makes it."""

    def __init__(self, batches: BatchSampler, num_processes: int) -> None:
        self.batch_sampler, self.num_processes, self.process_index = batches, num_processes, 0
        self.batch_size, self.drop_last = 3, False

    def __len__(self) -> int:
        return len(self.batch_sampler) // self.num_processes


@pytest.mark.parametrize(
    ("sampler", "within"),
    [
        (SequentialSampler(DATA), ""),
        (DistributedSampler(DATA, num_replicas=2, rank=0), "DistributedSampler"),
        (DistributedSampler(DATA, num_replicas=1, rank=0), ""),
    ],
)
def test_a_sampler_that_divides_within_another_one_is_named(sampler: Sampler[int], within: str) -> None:
    loader = DataLoader(DATA, batch_sampler=Shard(BatchSampler(sampler, 3, drop_last=False), 2))
    assert loader_facts(loader, torch)["sampler_within"] == within
    assert loader_facts(DataLoader(DATA, batch_size=3, sampler=sampler), torch)["sampler_within"] == ""


def test_the_seed_of_a_sampler_and_workers_that_stay_are_told() -> None:
    sampler = DistributedSampler(DATA, num_replicas=2, rank=1, seed=7)
    facts = loader_facts(DataLoader(DATA, sampler=sampler, num_workers=1, persistent_workers=True), torch)
    assert (facts["sampler_seed"], facts["persistent"]) == (7, True)
    assert not loader_facts(DataLoader(DATA, num_workers=1), torch)["persistent"]
