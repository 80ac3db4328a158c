"""Two ranks on gloo whose reductions outlast their backward, and when both were over: exposed.py OUT STEPS."""

import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.on_gpu.jobs.rank import device_ids, join, leave

OUT, STEPS = sys.argv[1], int(sys.argv[2])


def main() -> None:
    device = join("gloo")
    on_gpu = device.type == "cuda"
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16))).to(device)
    newest: list[Any] = [None]

    def now() -> Any:
        if not on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_ready(_: Any) -> None:
        newest[0] = now()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(is_ready)
    ddp = DistributedDataParallel(model, device_ids=device_ids(device), bucket_cap_mb=8)
    optimizer = torch.optim.SGD(ddp.parameters(), 1e-4)
    inputs = torch.randn(64, 1024, device=device)
    spans = []
    for _ in DataLoader(range(STEPS), batch_size=None):
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        spans.append((newest[0], now()))
        optimizer.step()
    if on_gpu:
        torch.cuda.synchronize()
    leave(OUT, exposed_ms=[ready.elapsed_time(end) if on_gpu else 1e3 * (end - ready) for ready, end in spans])


main()
