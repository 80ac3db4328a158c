"""Runs on ranks, as a test module: correct bodies of many kinds, each of which has to pass every time."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddpdoctor.testing.ranks import DdpRank

DDP = nn.parallel.DistributedDataParallel
TURNS = 10
pytestmark = [pytest.mark.ddp(timeout=120), pytest.mark.parametrize("turn", range(TURNS))]


def _train(model: nn.Module, steps: int = 3, width: int = 8) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, width)).sum().backward()
        optimizer.step()


def test_a_sum(turn: int, ddp_rank: DdpRank) -> None:
    value = torch.full((turn + 1,), float(ddp_rank))
    dist.all_reduce(value)
    assert value.sum() == turn + 1


def test_a_model_that_trains(turn: int) -> None:
    model = DDP(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    _train(model)
    first = next(model.parameters()).detach().clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, next(model.parameters()))


def test_accumulation_without_sync(turn: int) -> None:
    model = DDP(nn.Linear(8, 2))
    for _ in range(2):
        with model.no_sync():
            model(torch.randn(4, 8)).sum().backward()
        model(torch.randn(4, 8)).sum().backward()


def test_groups_of_some_ranks(turn: int, ddp_rank: DdpRank) -> None:
    groups = [dist.new_group([0]), dist.new_group([1]), dist.new_group([0, 1])]
    for _ in range(ddp_rank + 1):
        dist.all_reduce(torch.ones(1), group=groups[ddp_rank])
    dist.all_reduce(torch.ones(1), group=groups[2])


def test_objects(turn: int, ddp_rank: DdpRank) -> None:
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, "x" * (10 + 90 * ddp_rank))
    assert [len(one) for one in objects] == [10, 100]
    told = [{"of": 0}] if ddp_rank == 0 else [None]
    dist.broadcast_object_list(told, 0)
    assert told == [{"of": 0}]


def test_a_message_and_its_answer(turn: int, ddp_rank: DdpRank) -> None:
    value = torch.zeros(3)
    if ddp_rank == 0:
        dist.send(torch.ones(3), 1)
        dist.recv(value, 1)
    else:
        dist.recv(value, 0)
        dist.send(value + 1, 0)
    assert value.sum() == (6 if ddp_rank == 0 else 3)


def test_waits_later(turn: int, ddp_rank: DdpRank) -> None:
    works = [dist.all_reduce(torch.ones(100), async_op=True) for _ in range(4)]
    time.sleep(0.4 * ddp_rank)
    for work in works:
        work.wait()


def test_one_rank_is_late(turn: int, ddp_rank: DdpRank) -> None:
    if ddp_rank == 1:
        time.sleep(0.9)
    dist.barrier()


def test_barriers_around_rank_0(turn: int, ddp_rank: DdpRank, tmp_path: Path) -> None:
    if ddp_rank == 0:
        torch.save({"turn": turn}, tmp_path / "state.pt")
    dist.barrier()
    assert torch.load(tmp_path / "state.pt")["turn"] == turn


def test_a_sampler_and_workers(turn: int, ddp_rank: DdpRank) -> None:
    data = TensorDataset(torch.arange(12.0).reshape(12, 1))
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=False)
    seen = [float(x) for (batch,) in DataLoader(data, 2, sampler=sampler, num_workers=turn % 2) for x in batch]
    assert seen == [float(x) for x in range(int(ddp_rank), 12, 2)]


def test_whole_passes_are_drawn(turn: int) -> None:
    loader = DataLoader(TensorDataset(torch.randn(40, 8)), 2)
    model = DDP(nn.Linear(8, 2))
    drawn = 0
    for _ in range(3):
        for (batch,) in loader:
            model(batch).sum().backward()
            drawn += 1
    assert drawn == 60 and len(loader) == 20


def test_uneven_inputs_are_joined(turn: int, ddp_rank: DdpRank) -> None:
    model = DDP(nn.Linear(8, 2))
    with model.join():
        for _ in range(2 + 2 * ddp_rank):
            model(torch.randn(4, 8)).sum().backward()


def test_unused_parameters_are_looked_for(turn: int, ddp_rank: DdpRank) -> None:
    class Branches(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(8, 2), nn.Linear(8, 2)

        def forward(self, x: Any, left: bool) -> Any:
            return (self.left if left else self.right)(x)

    model = DDP(Branches(), find_unused_parameters=True)
    for step in range(3):
        model(torch.randn(4, 8), (step + ddp_rank) % 2 == 0).sum().backward()


def test_ranks_are_random_each(turn: int, ddp_rank: DdpRank) -> None:
    drawn: list[Any] = [None, None]
    dist.all_gather_object(drawn, random.random())
    assert drawn[0] != drawn[1]


def test_an_error_that_is_expected(turn: int) -> None:
    with pytest.raises(ValueError, match="no such rank"):
        raise ValueError("no such rank")
    dist.barrier()


def test_no_collective_at_all(turn: int, ddp_rank: DdpRank) -> None:
    assert dist.get_rank() == ddp_rank


@pytest.mark.ddp(nproc=3, timeout=120)
def test_three_ranks(turn: int, ddp_rank: DdpRank) -> None:
    pair = dist.new_group([0, 2])
    value = torch.ones(1)
    if ddp_rank != 1:
        dist.all_reduce(value, group=pair)
    dist.all_reduce(value)
    assert value == 5


@pytest.mark.ddp(nproc=1)
def test_one_rank(turn: int) -> None:
    _train(DDP(nn.Linear(8, 2)))


@pytest.mark.ddp(device="stand-in", timeout=120)
def test_the_stand_in_for_gpus(turn: int, ddp_rank: DdpRank) -> None:
    model = DDP(nn.Linear(8, 2).cuda(), device_ids=[int(ddp_rank)])
    model(torch.randn(4, 8, device=ddp_rank.device)).sum().backward()
    assert dist.get_backend() == "nccl" and torch.cuda.device_count() == 2


@pytest.mark.ddp(init=False)
def test_a_group_of_its_own(turn: int) -> None:
    dist.init_process_group("gloo")
    _train(DDP(nn.Linear(8, 2)))
    dist.destroy_process_group()
    assert "torch" in sys.modules
