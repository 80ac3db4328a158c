"""Sharded modules whose gradients are reduced over fewer ranks than share the data, and parameters that they ignore."""

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
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x + torch.relu(self.lin(x)) * self.scale


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.expert = nn.Linear(8, 8)

    def forward(self, x):
        y = self.expert(all_to_all_single(torch.empty_like(x), x))
        return x + all_to_all_single(torch.empty_like(y), y)


def build(middle=Block):
    return nn.Sequential(Block(), middle(), nn.Linear(8, 4))


def mesh_of(*names, shape=(world, 1)):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def main():
    torch.manual_seed(3)
{made}
    data = TensorDataset(torch.arange(512.0).view(64, 8) / 512, torch.arange(256.0).view(64, 4) / 256)
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=3))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05)
    for step, (inputs, targets) in enumerate({batches}):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
{before}
        optimizer.step()
    dist.destroy_process_group()


main()
"""
SLICED = "zip(data.tensors[0][rank::world].split(8), data.tensors[1][rank::world].split(8))"
HYBRID = (
    "HYBRID_SHARD over a mesh whose shard dimension has one rank became NO_SHARD: gradients are reduced over rank 0"
)
CUT = "it was given a part of a larger mesh: gradients are reduced over rank 0 alone"
OF_ONE_BLOCK = """
mesh = mesh_of("dp_replicate", "dp_shard")
model = build()
fully_shard(model[1], mesh=mesh["dp_shard"])
fully_shard(model, mesh=mesh)
"""
IN_PART = {
    "a hybrid of one rank": (
        'model = FSDP(build(), device_mesh=mesh_of("ddp", "fsdp"), sharding_strategy=ShardingStrategy.HYBRID_SHARD, '
        "device_id=CPU, use_orig_params=True)",
        "FSDP(build()",
        HYBRID,
    ),
    "its units, flattened": (
        'model = FSDP(build(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_mesh=mesh_of("r", "s"), '
        "sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2, device_id=CPU)",
        "FSDP(build()",
        HYBRID,
    ),
    "a group of one rank": (
        "groups = [dist.new_group([one]) for one in range(world)]\n"
        "model = FSDP(build(), process_group=groups[rank], device_id=CPU)",
        "process_group=",
        "its group, or mesh, has no other ranks: gradients are reduced over rank 0 alone",
    ),
    "one dimension of the mesh": (
        'model = fully_shard(build(), mesh=mesh_of("r", "s")["s"])',
        "fully_shard(build()",
        CUT,
    ),
    "one dimension, of one block": (OF_ONE_BLOCK, "fully_shard(model[1]", CUT),
    "one dimension, the older wrapper": (
        'model = FSDP(build(), device_mesh=mesh_of("r", "s")["s"], device_id=CPU, use_orig_params=True)',
        "FSDP(build()",
        CUT,
    ),
}
IGNORED = {
    "in place": (
        "model = build()\nfully_shard(model, ignored_params={model[0].scale, model[1].scale})",
        "0.scale, 1.scale",
    ),
    "states": (
        "model = build()\nmodel = FSDP(model, ignored_states=[model[0].scale, model[1].scale], device_id=CPU, "
        "use_orig_params=True)",
        "0.scale, 1.scale",
    ),
    "a module": ("model = build()\nmodel = FSDP(model, ignored_modules=[model[2]], device_id=CPU)", "2.bias, 2.weight"),
}
AVERAGE = """
for held in {held}:
    grad = getattr(held.grad, "_local_tensor", held.grad)
    dist.all_reduce(grad)
    grad.div_(world)
"""
EXPERTS = """
mesh = mesh_of("ep", "dp")
model = build(Moe)
fully_shard(model[1], mesh=mesh["dp"])
fully_shard(model, mesh=mesh)
"""
TENSOR_PARALLEL = """
mesh = mesh_of("dp", "tp", shape=(1, world))
model = build()
parallelize_module(model, mesh["tp"], {"0.lin": ColwiseParallel(output_layouts=Replicate())})
fully_shard(model, mesh=mesh["dp"])
"""
RIGHT = {
    "a real hybrid in place": ('model = fully_shard(build(), mesh=mesh_of("r", "s"))', ""),
    "no shards over all ranks": (
        "model = FSDP(build(), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=CPU, use_orig_params=True)",
        "",
    ),
    "a mesh of one dimension": ("model = build()\nfully_shard(model[0])\nfully_shard(model)", ""),
    "the other dimension by hand": (
        'model = fully_shard(build(), mesh=mesh_of("r", "s")["s"])',
        AVERAGE.format(held="model.parameters()"),
    ),
    "what is ignored by hand": (
        "model = build()\nfully_shard(model, ignored_params={model[0].scale})",
        AVERAGE.format(held="[model[0].scale]"),
    ),
    "what is ignored is frozen": (
        "model = build()\nmodel[0].requires_grad_(False)\n"
        "fully_shard(model, ignored_params=set(model[0].parameters()))",
        "",
    ),
    "experts that begin alike": (EXPERTS, ""),
    "experts that are ignored": (
        "model = build(Moe)\nfully_shard(model, ignored_params=set(model[1].parameters()))",
        "",
    ),
    "tensor parallel": (TENSOR_PARALLEL, ""),
}


def examined(
    folder: Path, made: str, before: str = "", batches: str = "loader"
) -> tuple[list[str], list[dict[str, Any]]]:
    """The lines of a script, and what is said of models that the ranks train apart."""
    text = SCRIPT.replace("{made}", indent(dedent(made).strip(), "    ")).replace("{batches}", batches)
    text = text.replace("{before}", indent(dedent(before).strip(), "        "))
    (folder / "train.py").write_text(text, encoding="utf-8")
    report = check(folder / "train.py", select=["DDP208", "DDP214"])
    return text.splitlines(), report["findings"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "a hybrid of one rank" else pytest.mark.long) for n in IN_PART]
)
def test_gradients_that_are_reduced_over_a_part_of_the_ranks_are_an_error(name: str, tmp_path: Path) -> None:
    made, place, why = IN_PART[name]
    lines, (finding,) = examined(tmp_path, made)
    assert (finding["code"], finding["severity"], finding["ranks"]) == ("DDP214", "error", [0, 1])
    assert "over rank 0 alone, and ranks 0 and 1 train different models" in finding["title"]
    assert why in finding["evidence"][0]["text"]
    assert place in lines[finding["locations"][0]["line"] - 1]


@pytest.mark.long
def test_data_may_be_divided_by_hand(tmp_path: Path) -> None:
    (finding,) = examined(tmp_path, IN_PART["one dimension of the mesh"][0], batches=SLICED)[1]
    assert finding["code"] == "DDP214"


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "states" else pytest.mark.long) for n in IGNORED])
def test_what_a_sharded_module_ignores_and_ranks_train_apart_is_an_error(name: str, tmp_path: Path) -> None:
    made, named = IGNORED[name]
    lines, (finding,) = examined(tmp_path, made)
    assert (finding["code"], finding["severity"]) == ("DDP214", "error")
    assert "2 parameters of the optimizer are in a sharded module, and ignored there" in finding["title"]
    assert finding["remedy"].startswith("Take them out of what is ignored")
    assert "loss.backward()" in lines[finding["locations"][0]["line"] - 1]
    assert named in finding["evidence"][0]["text"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "what is ignored by hand" else pytest.mark.long) for n in RIGHT]
)
def test_parts_of_one_model_and_averages_by_hand_are_not_reported(name: str, tmp_path: Path) -> None:
    assert examined(tmp_path, *RIGHT[name])[1] == []
