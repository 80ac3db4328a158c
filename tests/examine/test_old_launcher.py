"""A script that takes ``--local_rank`` and not ``--local-rank`` is told its local rank in its own words."""

from __future__ import annotations

from pathlib import Path

from tests.check_command import check

SCRIPT = """
import argparse
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
assert args.local_rank == int(os.environ["LOCAL_RANK"])
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(8, 4)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_the_old_launcher_and_an_old_script_are_rehearsed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launch = ("python", "-m", "torch.distributed.launch", "--nproc_per_node=4", "train.py")
    code, report = check("--time-limit", "240", "--", *launch, cwd=tmp_path)
    rehearsal = report["rehearsal"]
    assert (rehearsal["status"], rehearsal["ranks"], rehearsal["steps"]) == ("completed", 2, 3), rehearsal
    assert (
        "the script takes --local_rank, which torch's launcher does not pass; each rank got its own"
        in (rehearsal["notes"])
    )
    # With this torch the command itself does not start.
    assert (code, [finding["code"] for finding in report["findings"]]) == (1, ["DDP503"])
