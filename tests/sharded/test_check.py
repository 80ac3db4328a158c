"""``ddpdoctor check`` of sharded jobs: the right ones are clean, and what is wrong in the others is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.check_command import check
from tests.sharded.jobs import RIGHT, WRONG, Job

ALONE = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = torch.zeros(1)
for inputs in torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4):
    optimizer.zero_grad()
    loss = model(inputs).sum()
    loss.backward()
    optimizer.step()
    losses = loss.detach()
    dist.all_reduce(losses)
dist.destroy_process_group()
"""
FORWARD_ONLY = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = torch.nn.Linear(8, 2)
fully_shard(model)
model(torch.randn(4, 8))
dist.destroy_process_group()
"""
PIPELINE = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
stage = torch.nn.Linear(32, 64) if rank == 0 else torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
for step in range(30):
    optimizer.zero_grad()
    if rank == 0:
        outputs = stage(torch.randn(8, 32))
        dist.send(outputs.detach(), 1)
        gradients = torch.empty_like(outputs)
        dist.recv(gradients, 1)
        outputs.backward(gradients)
    else:
        inputs = torch.empty(8, 64)
        dist.recv(inputs, 0)
        inputs.requires_grad_()
        stage(inputs).square().mean().backward()
        dist.send(inputs.grad, 0)
    optimizer.step()
dist.destroy_process_group()
"""

# One replica, whose two ranks exchange the 16 numbers of each output.
TENSOR_PARALLEL = """import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    torch.manual_seed(100 + step)
    optimizer.zero_grad()
    (model(torch.randn(4, 8)) - torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("job", RIGHT, ids=lambda job: job.name)
def test_a_right_job_is_clean_and_what_takes_the_place_of_ddp_is_a_fact(job: Job, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(job.text())
    code, report = check("--nproc", str(job.ranks), "train.py", cwd=tmp_path)
    assert (code, report["findings"], report["rehearsal"]["status"]) == (0, [], "completed"), report["rehearsal"]
    assert any("Net is sharded by" in note for note in report["rehearsal"]["notes"])
    states = {outcome["name"]: outcome["state"] for outcome in report["outcomes"]}
    assert states["rank-divergent-collective"] == states["missing-distributed-sampler"] == "passed"
    assert states["unused-parameters"] == states["no-gradient-bucket-view"] == "nothing-to-look-at"


@pytest.mark.parametrize("job", WRONG, ids=lambda job: job.name)
def test_what_is_wrong_in_a_sharded_job_is_found(job: Job, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(job.text())
    code, report = check("--nproc", str(job.ranks), "train.py", cwd=tmp_path)
    assert (code, [finding["name"] for finding in report["findings"]]) == (1, [job.found])


def test_ranks_that_exchange_numbers_only_train_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ALONE)
    code, report = check("train.py", cwd=tmp_path)
    assert (code, report["rehearsal"]["status"]) == (3, "failed")
    assert "exchanged no gradients" in report["rehearsal"]["reason"]


def test_a_sharded_model_that_makes_no_step_is_not_said_to_train_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FORWARD_ONLY)
    code, report = check("train.py", cwd=tmp_path)
    assert (code, report["rehearsal"]["status"]) == (3, "failed")
    assert report["rehearsal"]["reason"] == "the script ended before every rank made an optimizer step"


@pytest.mark.parametrize("sharded", ['fully_shard(model, mesh=mesh["dp"])\n', ""], ids=["sharded", "divided"])
def test_parts_of_a_small_sharded_model_are_a_job(sharded: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TENSOR_PARALLEL.replace('fully_shard(model, mesh=mesh["dp"])\n', sharded))
    code, report = check("train.py", cwd=tmp_path)
    assert (code, report["rehearsal"]["status"], report["findings"]) == (0, "completed", [])


def test_stages_that_send_to_each_other_are_a_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PIPELINE)
    code, report = check("train.py", cwd=tmp_path)
    assert (code, report["findings"]) == (0, [])
    assert any("send each other what they compute" in note for note in report["rehearsal"]["notes"])
