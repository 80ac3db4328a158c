"""Parameters that something else than their optimizer changes, in a rehearsal: on one rank, and alike on all."""

from __future__ import annotations

from pathlib import Path

from tests.forks import check

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)


class Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 1)

    def forward(self, inputs):
        return self.inner(inputs)


model, clamped = DistributedDataParallel(nn.Linear(8, 1)), DistributedDataParallel(Clamped())
slow = [parameter.detach().clone() for parameter in model.parameters()]
optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, clamped)]
torch.manual_seed(rank)
for step in range(6):
    for each, optimizer in zip((model, clamped), optimizers):
        optimizer.zero_grad()
        each(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        for parameter in clamped.parameters():
            parameter.clamp_(-0.1, 0.1)
    if rank == 1 and step == 2:
        for parameter, kept in zip(model.parameters(), slow):
            parameter.data.copy_(kept)
    # The replicas are compared, and nothing is averaged by that.
    flat = torch.cat([parameter.detach().flatten() for each in (model, clamped) for parameter in each.parameters()])
    dist.all_reduce(flat, op=dist.ReduceOp.MAX)
dist.destroy_process_group()
"""


def test_the_ranks_that_change_parameters_beside_the_optimizer_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    report = check(tmp_path / "train.py", select=["DDP208"])
    assert report["rehearsal"]["status"] == "completed", report["rehearsal"]
    (finding,) = report["findings"]
    # The source knows the line, and the run what came of it and between which steps.
    line = next(number for number, text in enumerate(SCRIPT.splitlines(), 1) if "copy_(kept)" in text)
    assert (finding["locations"][0]["line"], finding["ranks"]) == (line, [0, 1])
    facts = [fact["text"] for fact in finding["evidence"]]
    assert facts[0].startswith("the parameters of Linear differ between ranks 0 and 1 after step 4"), facts
    assert any(fact.startswith("between steps 3 and 4 the parameters change on rank 1 only") for fact in facts)
    assert finding["remedy"] == "Change them on every rank: move it out of `if rank == 1 and step == 2`."


PRUNED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8))
sampler = DistributedSampler(data)
loader = DataLoader(data, 4, sampler=sampler)
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scores = torch.zeros(1, 8)


def collect(grad):
    scores.add_(grad.abs())


model.module.weight.register_hook(collect)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for (inputs,) in loader:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        if epoch > 1:
            with torch.no_grad():
                model.module.weight.mul_(scores > scores.median())
dist.destroy_process_group()
"""


def test_what_ranks_do_to_parameters_only_later_is_found_in_a_later_look(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PRUNED, encoding="utf-8")
    (finding,) = check(tmp_path / "train.py", select=["DDP208"])["findings"]
    assert finding["title"].startswith("the parameters of Linear differ between ranks 0 and 1 after step 10 of")
    assert finding["remedy"].startswith("What changes parameters beside the optimizer")
