"""A job that is too large for its machines, and one that fits, rehearsed on this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.check_command import check

SCRIPT = """
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    torch.set_num_threads(THREADS)
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    data = TensorDataset(torch.randn(64, 512))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=WORKERS)
    model = DDP(nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 256)).to(device), WRAPPED)
    optimizer = OPTIMIZER
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, (x,) in enumerate(loader):
            views = [model(view.to(device)) for view in (x, -x)]
            loss = sum(view.square().mean() for view in views)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if EVERY_FOURTH and step % 4:
                continue
            logged = loss.detach().clone()
            dist.all_reduce(logged)  # the log
            if dist.get_rank() == 0:
                print(logged.item() / dist.get_world_size())
    for (x,) in loader if len(sys.argv) > 1 else ():
        loss = model(x.to(device)).mean()
        loss.backward()
        optimizer.step()
        last_loss = loss.detach().clone()
        dist.all_reduce(last_loss)  # never reached
        print(last_loss.item() / dist.get_world_size())
    dist.destroy_process_group()


main()
"""
TOO_LARGE = {
    "THREADS": "2",
    "WORKERS": "3",
    "WRAPPED": "gradient_as_bucket_view=False",
    "OPTIMIZER": "torch.optim.AdamW(model.parameters(), lr=1e-3)",
    "EVERY_FOURTH": "False",
}
FITS = {
    "THREADS": "1",
    "WORKERS": "1",
    "WRAPPED": "gradient_as_bucket_view=True",
    "OPTIMIZER": "ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)",
    "EVERY_FOURTH": "step >= 0",
}
MACHINE = "[tool.ddpdoctor.job]\ndevice-memory-gib = 0.02\ncores = 8\n"
MIB = 1 << 20
LAUNCH = ("--select", "DDP212,DDP508,DDP313", "--", "torchrun", "--nproc-per-node", "8", "train.py")


def rehearsed(folder: Path, values: dict[str, str]) -> dict[str, Any]:
    text = SCRIPT
    for name, value in values.items():
        text = text.replace(name, value)
    (folder / "train.py").write_text(text)
    (folder / "pyproject.toml").write_text(MACHINE)
    return check(*LAUNCH, cwd=folder)[1]


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if text in line)


def test_a_job_that_is_too_large_for_its_machines_is_told_so_before_launch(tmp_path: Path) -> None:
    report = rehearsed(tmp_path, TOO_LARGE)
    state, cores, hot, unseen = report["findings"]
    assert (state["code"], state["severity"], state["basis"]) == ("DDP212", "warning", ["rehearsal"])
    sizes = {fact["text"].split(":")[0]: fact["numbers"].get("bytes", 0) / MIB for fact in state["evidence"]}
    parts = ("weights", "gradients", "DDP's buckets", "the state of AdamW")
    assert [round(sizes[part]) for part in parts] == [3, 3, 3, 6]
    assert (cores["code"], cores["severity"], cores["basis"]) == ("DDP508", "advice", ["rehearsal"])
    assert cores["title"] == "a node with 8 ranks runs 40 threads on 8 cores"
    assert (hot["code"], hot["severity"], hot["basis"]) == ("DDP313", "advice", ["rehearsal", "source"])
    assert hot["locations"][0]["line"] == line_of("# the log")
    steps = report["rehearsal"]["steps"]
    assert hot["evidence"][0]["numbers"] == {"calls": steps, "steps": steps, "bytes_per_call": 4}
    assert (unseen["basis"], unseen["locations"][0]["line"]) == (["source"], line_of("# never reached"))
    assert unseen["unconfirmed"].startswith("not rehearsed: no rank reached")


def test_a_job_that_fits_its_machines_is_clean(tmp_path: Path) -> None:
    report = rehearsed(tmp_path, FITS)
    (unseen,) = report["findings"]
    assert unseen["locations"][0]["line"] == line_of("# never reached")
    (cleared,) = report["refuted"]
    assert (cleared["code"], cleared["location"]["line"]) == ("DDP313", line_of("# the log"))
    assert (report["verdict"], report["complete"]) == ("clean", True)
    states = {outcome["code"]: outcome["state"] for outcome in report["outcomes"]}
    assert states == {"DDP212": "passed", "DDP313": "findings", "DDP508": "passed"}
