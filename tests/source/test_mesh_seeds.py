"""Seeds by one coordinate of a mesh, of which another one counts ranks with other data as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.source.marked import marks, places, written

_JOB = """
import argparse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

args = argparse.ArgumentParser().parse_args()
dist.init_process_group("gloo")
world = dist.get_world_size()
mesh = init_device_mesh("cpu", (args.outer, world // args.outer), mesh_dim_names=("outer", "inner"))
torch.manual_seed(args.seed)
model = nn.Linear(16, 16)
{shard}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
{seed}
{data}
    noise = torch.randn_like(x){generator}
    loss = (model(x + noise) - noise).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
_WHOLE = "fully_shard(model, mesh=mesh)"
_SLICED = """
data = torch.randn(1024, 16, generator=torch.Generator().manual_seed(5))[dist.get_rank() :: dist.get_world_size()]
for step in range(100):
    x = data[step : step + 8]
"""
_LOADED = """
data = TensorDataset(torch.load("data.pt"))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
for (x,) in loader:
"""


def job(seed: str, shard: str = _WHOLE, data: str = _SLICED, generator: str = "") -> str:
    return _JOB.format(seed=seed, shard=shard, data=data.rstrip(), generator=generator)


_SEEDS = {
    "a part of the mesh": "torch.manual_seed(args.seed + mesh['outer'].get_local_rank())  # DDP104",
    "by the name of a dimension": "torch.manual_seed((args.seed + mesh.get_local_rank('outer')) % 2**63)  # DDP104",
    "by its number": "torch.manual_seed(args.seed + 1000 * mesh.get_local_rank(mesh_dim=1))  # DDP104",
    "a coordinate": "torch.manual_seed(args.seed + mesh.get_coordinate()[0])  # DDP104",
    "the rank in a group": "torch.manual_seed(args.seed + dist.get_rank(mesh.get_group('outer')))  # DDP104",
    "in a function": """
def seed_all(mesh, seed, dimension="inner"):
    place = mesh[dimension]
    torch.manual_seed(seed ^ place.get_local_rank())  # DDP104
seed_all(mesh, args.seed)
""",
}


@pytest.mark.parametrize("data", [_SLICED, _LOADED], ids=["sliced", "loaded"])
@pytest.mark.parametrize("seed", _SEEDS.values(), ids=list(_SEEDS))
def test_seed_by_one_of_two_coordinates(tmp_path: Path, seed: str, data: str) -> None:
    path = written(tmp_path, job(seed, data=data))
    assert places(path, "DDP104") == marks(path)


_BOTH = "torch.manual_seed(args.seed + mesh.get_local_rank('outer') * mesh.size(1) + mesh.get_local_rank('inner'))"
_RIGHT = {
    "both coordinates": job(_BOTH),
    "the rank": job("torch.manual_seed(args.seed + dist.get_rank())"),
    "the rank beside one of them": job("torch.manual_seed(args.seed + 7 * mesh.get_local_rank(0) + dist.get_rank())"),
    "the rank in the mesh": job("torch.manual_seed(args.seed + mesh.get_rank())"),
    "seeded again by the rank": job(_SEEDS["by its number"] + "\ntorch.manual_seed(dist.get_rank())"),
    "the other dimension divides the tensors": job(
        "torch.manual_seed(args.seed + mesh['outer'].get_local_rank())",
        "parallelize_module(model, mesh['inner'], {})\nfully_shard(model, mesh=mesh['outer'])",
    ),
    "data that the other dimension shares": job(
        "torch.manual_seed(args.seed + mesh['outer'].get_local_rank())",
        data="for step in range(100):\n    x = torch.load(f'batch-{step}.pt')",
    ),
}


@pytest.mark.parametrize("script", _RIGHT.values(), ids=list(_RIGHT))
def test_ranks_with_other_data_have_other_seeds(tmp_path: Path, script: str) -> None:
    assert places(written(tmp_path, script), "DDP104") == []
