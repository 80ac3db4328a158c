"""What ranks do to replicas apart is one finding, of source and run: at the line that does it, with the proof."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

import pytest

from tests.forks import check

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{before}
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(8, 8)).square().mean().backward()
{inside}
    optimizer.step()
dist.destroy_process_group()
"""
CASES = {
    "a rate by rank": ("DDP208", 'optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)  # here', ""),
    "a clip on one rank": (
        "DDP208",
        "",
        "if rank == 0:\n    nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # here",
    ),
    "a clip by rank": ("DDP208", "", "nn.utils.clip_grad_norm_(model.parameters(), 0.01 + rank)  # here"),
    "a layer set to zero": ("DDP208", "if rank == 1:\n    nn.init.zeros_(model.module[2].weight)  # here", ""),
    "another head": ("DDP213", "model.module[2] = nn.Linear(8, 1)  # here", ""),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if "head" in name or name == "a rate by rank" else pytest.mark.long)
        for name in CASES
    ],
)
def test_the_line_that_parts_replicas_leads(name: str, tmp_path: Path) -> None:
    code, before, inside = CASES[name]
    text = SCRIPT.format(before=before, inside=indent(inside, "    "))
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    report = check(tmp_path / "train.py")
    (finding,) = [one for one in report["findings"] if one["severity"] != "advice"]
    here = next(number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# here"))
    assert (finding["code"], finding["locations"][0]["line"]) == (code, here), finding["title"]
    assert sorted(finding["basis"]) == ["rehearsal", "source"]
    assert {fact["basis"] for fact in finding["evidence"]} == {"rehearsal", "source"}


BESIDE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 4))
{made}
torch.manual_seed(dist.get_rank())
for step in range(6):
    x, y = torch.randn(4, 8), torch.randint(0, 4, (4,))
    optimizer.zero_grad()
    {loss}
    loss.backward()
    {then}
    optimizer.step()
dist.destroy_process_group()
"""
TEMPERATURE = (
    "scale = nn.Parameter(torch.ones(1))\noptimizer = torch.optim.SGD([*model.parameters(), scale], 0.1)",
    "loss = F.cross_entropy(model(x) / scale, y)",
)
HEAD = (
    "head = nn.Linear(4, 4)\n"
    "optimizer = torch.optim.SGD([{'params': model.parameters()}, {'params': head.parameters()}], 0.1)",
    "loss = F.cross_entropy(head(model(x)), y)",
)
AVERAGED = "dist.all_reduce(scale.grad)\n    scale.grad /= dist.get_world_size()"
WRAPPED = (HEAD[0].replace("nn.Linear(4, 4)", "DistributedDataParallel(nn.Linear(4, 4))"), HEAD[1])


@pytest.mark.parametrize(
    ("made", "loss", "then", "found"),
    [
        pytest.param(*TEMPERATURE, "", ["DDP214"], id="a temperature"),
        pytest.param(*HEAD, "", ["DDP214"], id="a head", marks=pytest.mark.long),
        pytest.param(*TEMPERATURE, AVERAGED, [], id="averaged by hand"),
        pytest.param(*WRAPPED, "", [], id="wrapped as well", marks=pytest.mark.long),
    ],
)
def test_what_is_trained_beside_a_wrapped_model_is_told_without_a_loader_too(
    made: str, loss: str, then: str, found: list[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(BESIDE.format(made=made, loss=loss, then=then), encoding="utf-8")
    report = check(tmp_path / "train.py")
    assert [one["code"] for one in report["findings"] if one["severity"] != "advice"] == found
