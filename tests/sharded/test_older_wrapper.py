"""Sharded models on the stand-in, in the ways in which scripts for GPUs build them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.check_command import check

SCRIPT = """
import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
device = torch.device("cuda", local_rank)
torch.manual_seed(dist.get_rank())


def net():
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))


BUILD
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(8):
    optimizer.zero_grad()
    model(torch.randn(4, 8, device=device)).float().square().mean().backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
dist.destroy_process_group()
"""
BUILDS = {
    "by an index": "model = FSDP(net().to(device), device_id=local_rank)",
    "by a device, of a model on the CPU": "model = FSDP(net(), device_id=device)",
    "where the model is": "model = FSDP(net().cuda())",
    "with the states of rank 0": "model = FSDP(net(), device_id=torch.cuda.current_device(), sync_module_states=True)",
    "by size, with original parameters": (
        "wrap = functools.partial(size_based_auto_wrap_policy, min_num_params=200)\\n"
        "model = FSDP(net().to(local_rank), auto_wrap_policy=wrap, device_id=local_rank, use_orig_params=True)"
    ),
    "in 16 bit": (
        "half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)\\n"
        "model = FSDP(net(), device_id=device, mixed_precision=half)"
    ),
    "without values": (
        "empty = (lambda part: part.to_empty(device=device, recurse=False))\\n"
        "with torch.device('cpu' if dist.get_rank() == 0 else 'meta'):\\n"
        "    bare = net()\\n"
        "model = FSDP(bare, device_id=device, sync_module_states=True, param_init_fn=empty)"
    ),
    "offloaded": "model = FSDP(net(), device_id=device, cpu_offload=CPUOffload(offload_params=True))",
    "as replicas of shards of a node": (
        "wrap = functools.partial(size_based_auto_wrap_policy, min_num_params=200)\\n"
        "hybrid = ShardingStrategy.HYBRID_SHARD\\n"
        "model = FSDP(net(), device_id=local_rank, auto_wrap_policy=wrap, sharding_strategy=hybrid)"
    ),
    "and its whole state is offloaded to one rank": (
        "from torch.distributed.fsdp import FullStateDictConfig, StateDictType\\n"
        "model = FSDP(net(), device_id=device)\\n"
        "model(torch.randn(4, 8, device=device)).sum().backward()\\n"
        "whole = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)\\n"
        "with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, whole):\\n"
        "    state = model.state_dict()\\n"
        "assert len(state) == (4 if dist.get_rank() == 0 else 0)"
    ),
    "as replicas of shards": (
        "mesh = init_device_mesh('cuda', (1, 2), mesh_dim_names=('replicate', 'shard'))\\n"
        "model = FSDP(net(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)"
    ),
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_a_wrapper_for_gpus_is_rehearsed_to_its_end(build: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("BUILD", build.replace("\\n", "\n")))
    code, report = check("--device", "stand-in", "train.py", cwd=tmp_path)
    assert (code, report["findings"], report["rehearsal"]["status"]) == (0, [], "completed"), report["rehearsal"]


WITH_TENSOR_PARALLELISM = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cuda", (2, 1), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)).to("cuda")
model = parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    torch.manual_seed(2 * step + mesh["dp"].get_local_rank())
    optimizer.zero_grad()
    model(torch.randn(4, 8, device="cuda")).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_shards_of_tensor_parallel_parameters_are_rehearsed_to_their_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WITH_TENSOR_PARALLELISM)
    _, report = check("--device", "stand-in", "train.py", cwd=tmp_path)
    assert report["rehearsal"]["status"] == "completed", report["rehearsal"]
    assert report["findings"] == []
