"""Keeps a GPU busy for a share of the time, in steps of a training: duty.py OUT SHARE SECONDS.

The periods have a length that no clock of a driver has, for a load in step with the sampling would be seen whole or
not at all.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.on_gpu.jobs.rank import device_ids, join, leave

OUT, SHARE, SECONDS = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
PERIOD_S = 0.0233
PERIODS = 5


def main() -> None:
    device = join("gloo")
    on_gpu = device.type == "cuda"
    model = DistributedDataParallel(nn.Linear(64, 64).to(device), device_ids=device_ids(device))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    factor = torch.randn(2048, 2048, device=device)
    once_ms = 0.0
    spans: list[float] = []
    if on_gpu:
        for _ in range(20):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            factor @ factor
            end.record()
            end.synchronize()
            once_ms = begin.elapsed_time(end)
    steps = int(SECONDS / (PERIODS * PERIOD_S))
    dist.barrier()
    began_s = due_s = time.perf_counter()
    for _ in DataLoader(range(steps), batch_size=None):
        optimizer.zero_grad()
        model(torch.ones(8, 64, device=device)).square().mean().backward()
        optimizer.step()
        for _ in range(PERIODS):
            if on_gpu:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(max(1, round(SHARE * PERIOD_S * 1e3 / once_ms))):
                    factor @ factor
                end.record()
                end.synchronize()
                spans.append(begin.elapsed_time(end))
            due_s = max(due_s + PERIOD_S, time.perf_counter())
            time.sleep(max(0.0, due_s - time.perf_counter()))
    leave(OUT, busy_percent=0.1 * sum(spans) / (time.perf_counter() - began_s))


main()
