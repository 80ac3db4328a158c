"""Meshes over two pretended nodes: shards that are gathered between nodes, and meshes that are laid out well."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

from tests import check_command, forks

SCRIPT = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
world, per_node = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
CPU = torch.device("cpu")
names = ("replicate", "shard")


def build():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def wrapped(**how):
    return FSDP(build(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_id=CPU, use_orig_params=True, **how)


def main():
    torch.manual_seed(0)
{made}
    data = TensorDataset(torch.arange(512.0).view(64, 8) / 512, torch.arange(256.0).view(64, 4) / 256)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for inputs, targets in DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=3)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    dist.destroy_process_group()


main()
"""
TURNED = 'mesh = DeviceMesh("cpu", torch.arange(world).view(-1, per_node).T, mesh_dim_names=names)'
ACROSS = {
    "turned": (f"{TURNED}\nmodel = build()\nfully_shard(model[0], mesh=mesh)\nfully_shard(model, mesh=mesh)", TURNED),
    "the older wrapper": (
        'mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=names)\nmodel = wrapped(device_mesh=mesh)',
        "DeviceMesh(",
    ),
    "groups of its own": (
        """
        pairs = [dist.new_group([first, first + per_node]) for first in range(per_node)]
        nodes = [dist.new_group([first, first + 1]) for first in range(0, world, per_node)]
        rank = dist.get_rank()
        model = wrapped(process_group=(pairs[rank % per_node], nodes[rank // per_node]))
        """,
        "pairs =",
    ),
    "one block": (
        f"{TURNED}\nmodel = build()\nfully_shard(model[2], mesh=mesh)\nfully_shard(model)",
        TURNED,
    ),
    "dimensions of a larger one": (
        """
        grid = torch.arange(world).view(-1, per_node, 1).permute(2, 1, 0)
        whole = DeviceMesh("cpu", grid, mesh_dim_names=("stage", "replicate", "shard"))
        model = fully_shard(build(), mesh=whole["replicate", "shard"])
        """,
        "whole =",
    ),
    "of groups": (
        """
        whole = DeviceMesh("cpu", torch.arange(world).view(-1, per_node), mesh_dim_names=("across", "within"))
        groups = [whole.get_group("within"), whole.get_group("across")]
        mesh = DeviceMesh.from_group(groups, "cpu", mesh=whole.mesh.T.contiguous(), mesh_dim_names=names)
        model = fully_shard(build(), mesh=mesh)
        """,
        "whole =",
    ),
}
WITHIN: dict[str, tuple[str, dict[str, Any]]] = {
    "in order": (
        'model = fully_shard(build(), mesh=init_device_mesh("cpu", (2, per_node), mesh_dim_names=names))',
        {"layout": "2x2"},
    ),
    "turned, on one node": (f"{TURNED}\nmodel = fully_shard(build(), mesh=mesh)", {"nproc": 4}),
    "no replicas": ("model = fully_shard(build())", {"layout": "2x2"}),
    "no room on a node": (
        'model = fully_shard(build(), mesh=DeviceMesh("cpu", [[0, 1, 2, 3]], mesh_dim_names=names))',
        {"layout": "2x2"},
    ),
    "nodes of one rank": (
        'model = fully_shard(build(), mesh=DeviceMesh("cpu", torch.arange(world).view(2, 2).T, mesh_dim_names=names))',
        {"layout": "4x1"},
    ),
    "the wrapper, in order": (
        'model = wrapped(device_mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=names))',
        {"layout": "2x2"},
    ),
}


def examined(made: str, folder: Path, **options: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """The lines of a script, and what a rehearsal shows of its meshes; advice from the source is left out."""
    text = SCRIPT.replace("{made}", indent(dedent(made).strip(), "    "))
    if "device" in options:
        for ours, of_gpu in (
            ('"gloo"', '"nccl"'),
            ('"cpu"', '"cuda"'),
            ("model(inputs)", "model(inputs.cuda()).cpu()"),
        ):
            text = text.replace(ours, of_gpu)
    (folder / "train.py").write_text(text, encoding="utf-8")
    if "device" in options:
        of_gpus = ("--layout", options["layout"], "--device", options["device"])
        report = check_command.check("--select", "DDP413", *of_gpus, "train.py", cwd=folder)[1]
    else:
        report = forks.check(folder / "train.py", select=["DDP413"], **options)
    assert report["rehearsal"]["status"] == "completed", report["rehearsal"]
    return text.splitlines(), [one for one in report["findings"] if "rehearsal" in one["basis"]]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "turned" else pytest.mark.long) for n in ACROSS])
def test_shards_that_cross_nodes_are_a_warning(name: str, tmp_path: Path) -> None:
    made, place = ACROSS[name]
    lines, (finding,) = examined(made, tmp_path, layout="2x2")
    assert (finding["severity"], finding["ranks"]) == ("warning", [])
    assert "the shards of " in finding["title"]
    shards, replicas = finding["evidence"][:2]
    assert "ranks 0 and 2, which share shards, are on nodes 0 and 1" in shards["text"]
    assert shards["numbers"]["bytes"] > 0
    assert "ranks 0 and 1, which hold replicas of one shard, are both on node 0" in replicas["text"]
    assert place in lines[finding["locations"][0]["line"] - 1]


@pytest.mark.long
def test_the_shards_of_a_gpu_job_are_known_on_the_stand_in(tmp_path: Path) -> None:
    _, (finding,) = examined(ACROSS["turned"][0], tmp_path, layout="2x2", device="stand-in")
    assert (finding["code"], finding["evidence"][0]["numbers"]["bytes"] > 0) == ("DDP413", True)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "in order" else pytest.mark.long) for n in WITHIN])
def test_meshes_that_are_laid_out_well_are_not_reported(name: str, tmp_path: Path) -> None:
    made, options = WITHIN[name]
    assert examined(made, tmp_path, **options)[1] == []
