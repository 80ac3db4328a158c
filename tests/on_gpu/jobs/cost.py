"""Trains small steps, whose cost is the CPU's, and large ones, whose cost is the GPU's: cost.py OUT SMALL LARGE."""

import statistics
import sys
import time
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from tests.on_gpu.jobs.rank import device_ids, digest, join, leave

OUT, SMALL, LARGE = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def main() -> None:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    device = join()
    on_gpu = device.type == "cuda"
    sizes = ((352, 16, SMALL), (4096 if on_gpu else 512, 4096 if on_gpu else 64, LARGE))
    trained: list[Any] = []
    truth: dict[str, float] = {}
    for name, (width, batch, steps) in zip(("small", "large"), sizes, strict=True):
        layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
        model = DistributedDataParallel(nn.Sequential(*layers).to(device), device_ids=device_ids(device))
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        rows = batch * steps if name == "small" else batch
        data = TensorDataset(torch.randn(rows, 8))
        loader = DataLoader(data, batch, shuffle=True) if name == "small" else [data[:]] * steps
        spread = torch.randn(8, width, device=device)
        marks = [time.thread_time_ns()]
        events: list[Any] = []
        for (inputs,) in loader:
            if name == "large" and on_gpu:
                events.append(torch.cuda.Event(enable_timing=True))
                events[-1].record()
            optimizer.zero_grad()
            model(inputs.to(device, non_blocking=True) @ spread).square().mean().backward()
            optimizer.step()
            marks.append(time.thread_time_ns())
        if on_gpu:
            torch.cuda.synchronize()
        taken = [end - begin for begin, end in pairwise(marks)]
        truth[f"{name}_cpu_us"] = statistics.mean(taken) / 1e3
        if events:
            spans = [begin.elapsed_time(end) for begin, end in pairwise(events[5:])]
            truth["large_gpu_ms"] = statistics.median(spans)
        trained += model.parameters()
    leave(OUT, digest=digest(trained), **truth)


main()
