"""A small training script with nothing wrong, and ways to break it."""

from __future__ import annotations

HEALTHY = """\
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def evaluate(model, rows):
    with torch.no_grad():
        total = model(rows).sum()
    dist.all_reduce(total)
    return total


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for rows, wanted in loader:
            rows, wanted = rows.to(device), wanted.to(device)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(rows), wanted)
            loss.backward()
            optimizer.step()
        evaluate(model, torch.ones(4, 8, device=device))
    dist.destroy_process_group()


main()
"""


def broken(before: str, after: str) -> str:
    """The script with one piece replaced, which has to be there."""
    assert before in HEALTHY
    return HEALTHY.replace(before, after, 1)


STEP = "            optimizer.step()\n"
BROKEN = {
    "collective": (
        broken(STEP, f"{STEP}            dist.all_reduce(torch.zeros(3))\n"),
        "DDP901",
        "collectives a step: 2 instead of 1",
    ),
    "host read": (
        broken(STEP, f"{STEP}            last = loss.item()\n"),
        "DDP901",
        "host synchronisations a step: 1 instead of 0",
    ),
    "larger model": (
        broken("nn.Linear(8, 16)", "nn.Linear(8, 16), nn.Linear(16, 16)"),
        "DDP901",
        "model state: ",
    ),
    "buffers": (
        broken("nn.ReLU()", "nn.BatchNorm1d(16, affine=False), nn.ReLU()"),
        "DDP901",
        "buffer broadcasts a step: 2 instead of 0",
    ),
    "stateful optimizer": (
        broken("torch.optim.SGD(model.parameters(), lr=0.01)", "torch.optim.Adam(model.parameters())"),
        "DDP901",
        "model state: ",
    ),
    "no sampler": (broken("batch_size=8, sampler=sampler", "batch_size=8, shuffle=True"), "DDP101", ""),
    "no set_epoch": (broken("sampler.set_epoch(epoch)", "pass"), "DDP102", ""),
    "hang": (
        broken(STEP, f"{STEP}            if dist.get_rank() == 0:\n                dist.barrier()\n"),
        "DDP301",
        "the ranks part",
    ),
    "mismatch": (
        broken("dist.all_reduce(total)", "dist.all_reduce(total.expand(2 + dist.get_rank()).clone())"),
        "DDP304",
        "",
    ),
    "no evaluation": (
        broken("        evaluate(model", "        if epoch > 5:\n            evaluate(model"),
        "DDP902",
        "no longer reaches",
    ),
}
"""Ten broken commits: the script, the code of a finding that must make it red, and words that its title must hold."""


_ACCUMULATED = """            scope = contextlib.nullcontext() if number % 2 else model.no_sync()
            with scope:
                loss = nn.functional.mse_loss(model(rows), wanted)
                loss.backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
"""
_STEP = HEALTHY[HEALTHY.index("            optimizer.zero_grad()") : HEALTHY.index("        evaluate(model, torch")]
MORE_HEALTHY = {
    "a small script": HEALTHY,
    "accumulation of two batches": "import contextlib\n"
    + HEALTHY.replace(_STEP, _ACCUMULATED).replace(
        "for rows, wanted in loader", "for number, (rows, wanted) in enumerate(loader)"
    ),
    "BatchNorm, its buffers broadcast": broken("nn.ReLU()", "nn.BatchNorm1d(16), nn.ReLU()"),
    "a loss read each step": broken(STEP, f"{STEP}            last = loss.item()\n"),
    "an average each step": broken(STEP, f"{STEP}            dist.all_reduce(loss.detach())\n"),
}
"""Healthy scripts beside those of the fault tables."""
