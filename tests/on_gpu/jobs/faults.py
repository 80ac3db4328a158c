"""Goes wrong in one way: faults.py OUT KIND. The kinds are the functions below; only ``healthy`` ends well."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.on_gpu.jobs.rank import leave

OUT, KIND = sys.argv[1:3]
TIMEOUT = timedelta(seconds=10)
CYCLES = 4_000_000_000
"""About two seconds of an H100."""
RANK = int(os.environ["RANK"])
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def healthy() -> None:
    dist.init_process_group("nccl", timeout=TIMEOUT, device_id=DEVICE)
    for _ in range(20):
        dist.all_reduce(torch.ones(1 << 20, device=DEVICE))
    torch.cuda.synchronize()
    leave(OUT)


def watchdog() -> None:
    """The collective waits on the GPU for kernels that take far longer than its time-out."""
    dist.init_process_group("nccl", timeout=TIMEOUT, device_id=DEVICE)
    for _ in range(3):
        dist.all_reduce(torch.ones(1 << 20, device=DEVICE))
    torch.cuda.synchronize()
    for _ in range(40):
        torch.cuda._sleep(CYCLES)
    dist.all_reduce(torch.ones(1 << 20, device=DEVICE))
    torch.cuda.synchronize()


def one_sided() -> None:
    """Rank 0 alone enters the last collective, by gloo or, where the name of the kind says so, by NCCL."""
    dist.init_process_group("nccl" if KIND.endswith("nccl") else "gloo", timeout=TIMEOUT)
    for _ in range(3):
        dist.all_reduce(torch.ones(1 << 10, device=DEVICE))
    if RANK == 0:
        dist.all_reduce(torch.ones(1 << 10, device=DEVICE))
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
    else:
        time.sleep(60)


def one_device() -> None:
    """Two ranks of NCCL on one GPU."""
    dist.init_process_group("nccl", timeout=TIMEOUT, device_id=DEVICE)
    dist.all_reduce(torch.ones(8, device=DEVICE))
    torch.cuda.synchronize()
    leave(OUT)


def no_device() -> None:
    torch.cuda.set_device(torch.cuda.device_count())


def out_of_memory() -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)


def device_assert() -> None:
    table, places = torch.zeros(3, device=DEVICE), torch.tensor([5], device=DEVICE)
    print(table[places].sum().item())


def illegal_access() -> None:
    """A kernel writes where the memory was taken away."""
    values = torch.ones(1 << 20, device=DEVICE)
    values.untyped_storage().resize_(0)
    values.add_(1)
    torch.cuda.synchronize()


if DEVICE.type == "cuda":
    torch.cuda.set_device(DEVICE)
globals()[KIND.removesuffix("_nccl")]()
