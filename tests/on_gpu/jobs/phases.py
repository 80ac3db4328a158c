"""Trains steps whose kernels far outlast their launch, the last of them profiled: phases.py OUT STEPS FIRST."""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader

from tests.on_gpu.jobs.rank import device_ids, join, leave

OUT, STEPS, FIRST = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def main() -> None:
    device = join()
    on_gpu = device.type == "cuda"
    # float32 without TF32: a forward of 8 layers takes an H100 some 50 ms, and its launch less than one.
    width, depth, batch = (4096, 8, 8192) if on_gpu else (512, 3, 512)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device), device_ids=device_ids(device))
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    inputs = torch.randn(batch, width, device=device)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    profiler = profile(activities=activities)
    for step, _ in enumerate(DataLoader(range(STEPS), batch_size=None), 1):
        if step == FIRST:
            profiler.start()
        with record_function(f"step {step} forward"):
            outputs = model(inputs)
        loss = outputs.square().mean()
        with record_function(f"step {step} backward"):
            loss.backward()
        with record_function(f"step {step} optimizer"):
            optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            # Each step begins with an empty queue: a full one would hold the host back to the pace of the GPU.
            torch.cuda.synchronize()
    profiler.stop()
    profiler.export_chrome_trace(f"{OUT}.trace.json")
    leave(OUT, steps=STEPS)


main()
