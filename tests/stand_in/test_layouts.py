"""A script that is right on one node and wrong on two is found out on this machine."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.errors import UsageError
from ddpdoctor.launch.request import Layout, parse_layout
from ddpdoctor.probe.rehearsal.rendezvous import pretend
from tests.check_command import check

SCRIPT = """
import os
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
places = [os.environ[name] for name in ("GROUP_RANK", "NODE_RANK", "LOCAL_WORLD_SIZE", "SLURM_NODEID", "SLURM_LOCALID")]
print("PLACE", rank, local_rank, *places)
dist.init_process_group("BACKEND")
DEVICE
model = DDP(nn.Linear(4, 2).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.arange(256.0).reshape(64, 4))
sampler = DistributedSampler(data, num_replicas=dist.get_world_size(), rank=SAMPLER)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (batch,) in DataLoader(data, batch_size=4, sampler=sampler):
        optimizer.zero_grad()
        model(batch.to(device)).sum().backward()
        optimizer.step()
if SAVER == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.barrier()
dist.destroy_process_group()
"""
ON_CPU = {"BACKEND": "gloo", "DEVICE": "device = torch.device('cpu')"}


def findings_in(directory: Path, layout: str, **parts: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and findings that are no advice."""
    text = textwrap.dedent(SCRIPT)
    for name, value in {**ON_CPU, **parts}.items():
        text = text.replace(name, value)
    (directory / "train.py").write_text(text)
    code, report = check("--layout", layout, "train.py", cwd=directory)
    return code, [finding for finding in report["findings"] if finding["severity"] != "advice"]


def test_a_script_that_minds_its_nodes_passes_on_two(tmp_path: Path) -> None:
    assert findings_in(tmp_path, "2x1", SAMPLER="rank", SAVER="rank") == (0, [])


def test_a_local_rank_for_the_global_one_is_proved_by_a_second_node(tmp_path: Path) -> None:
    code, findings = findings_in(tmp_path, "2x1", SAMPLER="local_rank", SAVER="local_rank")
    assert code == 1
    proved = {finding["code"]: finding for finding in findings if "rehearsal" in finding["basis"]}
    assert {"DDP501", "DDP517"} <= proved.keys()
    assert proved["DDP501"]["severity"] == "error" and proved["DDP501"]["ranks"] == [0, 1]
    assert len([finding for finding in findings if finding["code"] in ("DDP501", "DDP601")]) == 1


def test_a_global_rank_as_a_gpu_index_is_proved_by_a_second_node(tmp_path: Path) -> None:
    device = "device = torch.device('cuda', rank); torch.cuda.set_device(device)"
    code, findings = findings_in(tmp_path, "2x1", BACKEND="nccl", DEVICE=device, SAMPLER="rank", SAVER="rank")
    assert code == 1
    proved = [finding for finding in findings if "rehearsal" in finding["basis"]]
    assert [(finding["code"], finding["ranks"]) for finding in proved] == [("DDP501", [1])]
    assert "rank 1 requested GPU 1 on node 1" in proved[0]["evidence"][0]["text"]


def test_ranks_know_their_place_as_a_launcher_on_that_node_would_tell_it() -> None:
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0"}
    pretend(environment, 2, slurm=True)
    assert environment["RANK"] == "3" and environment["WORLD_SIZE"] == "4"
    assert (environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"]) == ("1", "2")
    assert environment["GROUP_RANK"] == environment["NODE_RANK"] == environment["SLURM_NODEID"] == "1"
    assert (environment["SLURM_PROCID"], environment["SLURM_LOCALID"], environment["SLURM_NTASKS"]) == ("3", "1", "4")
    without = {"RANK": "0", "WORLD_SIZE": "2"}
    pretend(without, 1, slurm=False)
    assert not [name for name in without if name.startswith("SLURM_")]


@pytest.mark.parametrize("text", ["", "2", "2y1", "0x2", "1x1", "-1x2", "99x99", "2x1x1"])
def test_what_is_no_layout_is_said_to_be_none(text: str) -> None:
    with pytest.raises(UsageError):
        parse_layout(text)


def test_a_layout_is_read() -> None:
    assert parse_layout("2X1") == Layout(2, 1) and str(Layout(2, 2)) == "2x2" and Layout(2, 2).ranks == 4
