"""Totals that ranks sum in place, in a rehearsal: those that take in earlier sums are named, the others are not."""

from __future__ import annotations

from pathlib import Path

from tests.forks import check

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 1))
data = TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
sampler = DistributedSampler(data)
optimizer = torch.optim.SGD(model.parameters(), 0.01)


class Meter:
    def __init__(self):
        self.total, self.count = torch.zeros(()), torch.zeros(())

    def update(self, value):
        self.total += value
        self.count += 1

    def average(self):
        dist.all_reduce(self.total)  # wrong
        dist.all_reduce(self.count)  # wrong
        return self.total / self.count


kept, seen, history, anew, ticks = Meter(), torch.zeros(2), torch.zeros(()), torch.zeros(()), torch.ones(())
means = torch.zeros(())
for inputs, targets in DataLoader(data, batch_size=8, sampler=sampler):
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    value = loss.detach() + 1
    kept.update(value)
    kept.average()
    seen.add_(torch.tensor([1.0, len(inputs)]))
    dist.reduce(seen, 0)  # not followed: rank 0 alone gets the sum
    history += value
    copy = history.clone()
    dist.all_reduce(copy)  # right: a copy
    anew.zero_()
    anew += value
    dist.all_reduce(anew)  # right: set anew
    dist.all_reduce(ticks)  # harmless: nothing is added, it only meets the others
    means += value
    dist.all_reduce(means)  # right: of the mean, what was averaged before is averaged again
    means /= world
    fresh = torch.tensor([value.item(), 1.0])
    dist.all_reduce(fresh)  # right: another tensor each time
dist.destroy_process_group()
"""


def test_totals_that_take_in_earlier_sums_are_named_once_a_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    report = check(tmp_path / "train.py", select=["DDP317"])
    assert (report["rehearsal"]["status"], report["exit_code"]) == ("completed", 1), report["rehearsal"]
    lines = SCRIPT.splitlines()
    named = {lines[finding["locations"][0]["line"] - 1].partition("# ")[2] for finding in report["findings"]}
    assert (named, len(report["findings"])) == ({"wrong"}, 2)
    assert report["findings"][1]["evidence"][0]["text"] == "in turn rank 0 gave 1, 3, 7, 15; rank 1 gave 1, 3, 7, 15"
