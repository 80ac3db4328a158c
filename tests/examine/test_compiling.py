"""A model that is compiled for GPUs is rehearsed as it is written where a CPU does their work."""

from __future__ import annotations

from pathlib import Path

from tests.check_command import check

SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def refuse(graph, inputs):
    raise AssertionError("this takes minutes on a CPU")


device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
model = DistributedDataParallel(torch.compile(torch.nn.Linear(8, 8).to(device), backend=refuse))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.ones(2, 8, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_nothing_is_compiled_for_a_cpu_in_a_gpus_place(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    _, report = check("--time-limit", "240", "train.py", cwd=tmp_path)
    rehearsal = report["rehearsal"]
    assert (rehearsal["status"], rehearsal["steps"], rehearsal["device"]) == ("completed", 2, "cpu"), rehearsal
