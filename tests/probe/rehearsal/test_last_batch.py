"""How many samples a loader leaves for the last batch of a pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from ddpdoctor.probe.rehearsal.data.lengths import short_batch_samples


class Stream(IterableDataset[int]):  # type: ignore[misc]
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Filled(BatchSampler):  # type: ignore[misc]
    even_batches = True


def sharded(samples: int, replicas: int = 2, drop_last: bool = False) -> DistributedSampler[int]:
    return DistributedSampler(torch.arange(samples), num_replicas=replicas, rank=0, drop_last=drop_last)


@pytest.mark.parametrize(
    ("samples", "options", "ranks_of_job", "left"),
    [
        (64, {"batch_size": 8}, 0, 0),
        (66, {"batch_size": 8}, 0, 2),
        (66, {"batch_size": 8, "drop_last": True}, 0, 0),
        (66, {"batch_size": 8, "sampler": sharded(66)}, 0, 1),
        (66, {"batch_size": 8, "sampler": sharded(66, drop_last=True)}, 0, 1),
        (64, {"batch_size": 8, "sampler": sharded(64)}, 0, 0),
        (64, {"batch_size": 8, "sampler": sharded(64)}, 7, 2),
        (66, {"batch_sampler": Filled(SequentialSampler(range(66)), 8, False)}, 0, 0),
        (66, {"batch_sampler": [[0, 1], [2]]}, 0, None),
        (66, {"batch_size": None}, 0, 0),
    ],
)
def test_what_is_left_follows_from_the_samples_of_a_rank_and_the_batch_size(
    samples: int, options: dict[str, object], ranks_of_job: int, left: int | None
) -> None:
    loader: DataLoader[int] = DataLoader(torch.arange(samples), **options)
    assert short_batch_samples(iter(loader), ranks_of_job) == left


def test_nothing_tells_how_long_a_stream_is() -> None:
    assert short_batch_samples(iter(DataLoader(Stream(), batch_size=4)), 0) is None
    assert short_batch_samples(iter(DataLoader(Stream(), batch_size=4, drop_last=True)), 0) == 0
