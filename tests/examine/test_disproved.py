"""A rehearsal that came to its end withdraws what it disproves, and nothing that it did not meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.check_command import check

DIVERGENT = """
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Mean:
    def __init__(self, every):
        self.every = every

    def after(self, epoch):
        if epoch % self.every:
            return
        dist.all_reduce(torch.ones(1))  # stays: the second one of rank 0 reduces in epoch 50


def meet():
    dist.barrier()  # stays: in epoch 50


parser = argparse.ArgumentParser()
parser.add_argument("--rank", type=int, default=0)
args = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
data = TensorDataset(torch.ones(64, 4))
sampler = DistributedSampler(data)
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hooks = [Mean(1)]
if rank == 0:
    hooks.append(Mean(50))
for epoch in range(1, 3):
    sampler.set_epoch(epoch)
    for (x,) in DataLoader(data, batch_size=8, sampler=sampler):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    if args.rank == 0:
        dist.all_reduce(torch.ones(2))  # withdrawn: it is 0 on every rank
    for hook in hooks:
        hook.after(epoch)
    meet()
    if rank == 0 and epoch == 50:
        meet()
    if rank == 0:
        if epoch == 50:
            dist.all_reduce(torch.ones(3))  # stays
dist.destroy_process_group()
"""


def marked(text: str, word: str) -> list[int]:
    return [number for number, line in enumerate(text.splitlines(), 1) if f"# {word}" in line]


def test_a_call_at_which_all_ranks_met_is_withdrawn_where_the_rank_alone_decides(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DIVERGENT, encoding="utf-8")
    _, report = check("train.py", cwd=tmp_path)
    assert report["rehearsal"]["status"] == "completed"
    found = sorted({one["locations"][0]["line"] for one in report["findings"] if one["code"] == "DDP301"})
    assert found == marked(DIVERGENT, "stays")
    assert [(one["code"], one["location"]["line"]) for one in report["refuted"]] == [
        ("DDP301", line) for line in marked(DIVERGENT, "withdrawn")
    ]


BY_HAND = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
average = getattr(dist, "all_" + "reduce")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4))
sampler = DistributedSampler(data)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for step, (x,) in enumerate(DataLoader(data, batch_size=8, sampler=sampler)):
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        for parameter in model.parameters():
            AVERAGE
            parameter.grad /= dist.get_world_size()
        optimizer.step()
dist.destroy_process_group()
"""
OF_A_FILE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
rows = torch.randn(128, 4)
torch.save(ROWS, f"rows_{rank}.pt")
data = TensorDataset(torch.load(f"rows_{rank}.pt"))
sampler = DistributedSampler(data)
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in DataLoader(data, batch_size=8, sampler=sampler):
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()
dist.destroy_process_group()
"""


def verdict_on(text: str, code: str, directory: Path) -> str:
    (directory / "train.py").write_text(text, encoding="utf-8")
    _, report = check("train.py", cwd=directory)
    assert report["rehearsal"]["status"] == "completed"
    standing = any(one["code"] == code for one in report["findings"])
    withdrawn = any(one["code"] == code for one in report["refuted"])
    assert standing != withdrawn
    return "stays" if standing else "withdrawn"


@pytest.mark.parametrize(
    ("average", "verdict"),
    [("average(parameter.grad)", "withdrawn"), ("average(parameter.grad) if step % 2 else None", "stays")],
    ids=["in each step", "in every second step"],
)
def test_gradients_that_were_the_same_before_each_step_need_no_wrap(average: str, verdict: str, tmp_path: Path) -> None:
    assert verdict_on(BY_HAND.replace("AVERAGE", average), "DDP214", tmp_path) == verdict


@pytest.mark.parametrize(("rows", "verdict"), [("rows", "withdrawn"), ("rows[rank::2].clone()", "stays")])
def test_samples_that_are_the_same_on_all_ranks_are_no_part(rows: str, verdict: str, tmp_path: Path) -> None:
    assert verdict_on(OF_A_FILE.replace("ROWS", rows), "DDP108", tmp_path) == verdict
