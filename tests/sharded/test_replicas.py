"""Meshes that keep replicas of shards: what begins apart is named, with the line that seeds the ranks apart."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

from tests.forks import check

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp_replicate", "dp_shard"))


def build():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def shard(model):
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main():
{made}
    data = TensorDataset(torch.arange(512.0).view(64, 8) / 512, torch.arange(256.0).view(64, 4) / 256)
    sampler = DistributedSampler(data, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for inputs, targets in DataLoader(data, batch_size=8, sampler=sampler):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


main()
"""
SEEDED = "torch.manual_seed(10 + rank)"
APART = {
    "seeded by rank": (f"{SEEDED}\nmodel = shard(build())", 4, SEEDED),
    "not seeded": ("model = shard(build())", 4, "loss ="),
    "a head of its own": (
        f"torch.manual_seed(0)\nbody = nn.Linear(8, 16)\n{SEEDED}\n"
        "model = shard(nn.Sequential(body, nn.ReLU(), nn.Linear(16, 4)))",
        2,
        SEEDED,
    ),
    "initialised after it is sharded": (
        f"""
        {SEEDED}
        with torch.device("meta"):
            model = build()
        shard(model).to_empty(device="cpu")
        for part in (model[0], model[2]):
            part.reset_parameters()
        """,
        4,
        SEEDED,
    ),
    "the older wrapper": (
        f"{SEEDED}\nmodel = FullyShardedDataParallel(build(), device_mesh=mesh, "
        'sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_id=torch.device("cpu"))\ntorch.manual_seed(7 + rank)',
        1,
        SEEDED,
    ),
}
ALIKE = {
    "seeded by rank afterwards": f"torch.manual_seed(10)\nmodel = shard(build())\n{SEEDED}",
    "broadcast before": (
        f"{SEEDED}\nmodel = build()\nfor parameter in model.parameters():\n    dist.broadcast(parameter.data, 0)\n"
        "shard(model)"
    ),
    "shards without replicas": f'{SEEDED}\nmodel = fully_shard(build(), mesh=init_device_mesh("cpu", (world,)))',
}


def examined(made: str, folder: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """The lines of a script, and the findings of this check; whether ranks train as one process is left out."""
    text = SCRIPT.format(made=indent(dedent(made).strip(), "    "))
    (folder / "train.py").write_text(text, encoding="utf-8")
    report = check(folder / "train.py", select=["DDP208"])
    assert report["rehearsal"]["status"] == "completed", report["rehearsal"]
    assert report["exit_code"] == bool(report["findings"])
    return text.splitlines(), report["findings"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "seeded by rank" else pytest.mark.long) for n in APART]
)
def test_replicas_that_begin_apart_are_an_error(name: str, tmp_path: Path) -> None:
    made, differ, place = APART[name]
    lines, (finding,) = examined(made, tmp_path)
    assert (finding["severity"], finding["ranks"]) == ("error", [0, 1])
    assert "ranks 0 and 1 hold replicas of the same shards of Sequential and begin with" in finding["title"]
    assert finding["evidence"][0]["numbers"]["parameters"] == differ
    assert place in lines[finding["locations"][0]["line"] - 1]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "broadcast before" else pytest.mark.long) for n in ALIKE]
)
def test_replicas_that_begin_alike_are_not_reported(name: str, tmp_path: Path) -> None:
    assert examined(ALIKE[name], tmp_path)[1] == []
