"""A training script that makes its steps in blocks, each when it is told to; what the cost of a profile is measured on.

``blocks_of_steps.py DIRECTORY TOOL STEPS`` reads a line from the pipe ``commands`` in the directory for each block, and
writes to ``answers`` what the block took on rank 0: seconds of wall time, CPU seconds of the training thread and of the
process. TOOL is ``none``, ``torch.profiler`` or ``traceml``, which need lines in the script.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH = 512
LAYERS = 4
BATCH = 64
WARM_UP_STEPS = 2
"""Steps of a block that do not count: caches and clocks were another's."""


def batches(loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> Iterator[list[torch.Tensor]]:
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()


def main() -> None:
    directory, tool, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    around: Any = lambda model: contextlib.nullcontext()  # noqa: E731
    profiler: Any = None
    if tool == "traceml":
        traceml_ai = importlib.import_module("traceml_ai")
        traceml_ai.init(mode="auto")
        around = traceml_ai.trace_step
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(8192, WIDTH), torch.randn(8192, WIDTH))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    source = batches(DataLoader(data, batch_size=BATCH, sampler=sampler), sampler)
    leads = dist.get_rank() == 0
    if tool == "torch.profiler":
        schedule = torch.profiler.schedule(wait=0, warmup=0, active=steps)
        activities = [torch.profiler.ProfilerActivity.CPU]
        profiler = torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=lambda trace: None)
        profiler.start()

    def run_one() -> None:
        with around(model):
            step(model, optimizer, *next(source))
        if profiler is not None:
            profiler.step()

    commands = (directory / "commands").open() if leads else None
    answers = (directory / "answers").open("w", buffering=1) if leads else None
    while commands is None or commands.readline():
        for _ in range(WARM_UP_STEPS):
            run_one()
        started = time.perf_counter(), time.thread_time(), time.process_time()
        for _ in range(steps):
            run_one()
        ended = time.perf_counter(), time.thread_time(), time.process_time()
        if answers is not None:
            print(*(end - start for start, end in zip(started, ended, strict=True)), file=answers)


if __name__ == "__main__":
    main()
