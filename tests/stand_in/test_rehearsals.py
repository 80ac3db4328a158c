"""Scripts that ask for CUDA and NCCL are rehearsed on two CPU ranks, and what the stand-in lacks accuses nobody."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.check_command import check

SCRIPT = """
import os
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank), pg_options=options)
    torch.set_float32_matmul_precision("high")
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).cuda()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DDP(torch.compile(model), device_ids=[local_rank], forward_sync_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    data = TensorDataset(torch.randn(256, 4), torch.arange(256) % 2)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=1, pin_memory=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (batch, target) in enumerate(loader):
            batch, target = batch.cuda(non_blocking=True), target.to(torch.device("cuda", local_rank))
            EXTRA
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(batch), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
    own = torch.full((2 + dist.get_rank(),), float(dist.get_rank()), device="cuda")
    parts = [torch.empty(2 + rank, device="cuda") for rank in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    assert [part.tolist() for part in parts] == [[0.0] * 2, [1.0] * 3]
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


def check_with(directory: Path, extra: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON report for the script with one more line."""
    (directory / "train.py").write_text(textwrap.dedent(SCRIPT).replace("EXTRA", extra))
    return check("train.py", cwd=directory)


def test_a_healthy_script_runs_to_its_end_in_silence(tmp_path: Path) -> None:
    code, report = check_with(tmp_path, "pass")
    assert (code, report["findings"]) == (0, [])
    rehearsal = report["rehearsal"]
    assert rehearsal["status"] == "completed" and rehearsal["device"] == "stand-in"
    assert (rehearsal["ranks"], rehearsal["steps"], rehearsal["batch_size"]) == (2, 8, 2)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("graph = torch.cuda.CUDAGraph()", "torch.cuda.CUDAGraph needs a real GPU"),
        ("assert batch.is_cuda, 'not on a GPU'", "AssertionError: not on a GPU"),
    ],
)
def test_what_only_a_gpu_has_is_inconclusive_and_names_the_line(tmp_path: Path, extra: str, said: str) -> None:
    code, report = check_with(tmp_path, extra)
    line = next(number for number, text in enumerate(SCRIPT.splitlines(), 1) if "EXTRA" in text)
    assert code == 3 and not [finding for finding in report["findings"] if finding["severity"] != "advice"]
    assert f"train.py:{line}" in report["rehearsal"]["reason"] and said in report["rehearsal"]["reason"]


def test_a_gpu_that_the_node_lacks_is_the_scripts_own_fault(tmp_path: Path) -> None:
    code, report = check_with(tmp_path, "batch = batch.to(f'cuda:{local_rank + 1}')")
    assert code == 1
    errors = [finding for finding in report["findings"] if finding["severity"] == "error"]
    assert [finding["ranks"] for finding in errors] == [[1]] and "invalid device ordinal" in errors[0]["title"]
