"""Trains on two ranks in chapters, each with a delay or a load that it knows, and writes down what it did.

Usage: training.py OUTPUT STEPS CHAPTER...

A chapter is a name and what it needs, with colons: ``late:forward:50`` (rank 1 is 50 ms late in forward), ``even``,
``barrier:100``, ``link:10`` (10 ns for each byte of gradients), ``loader:30``, ``wide``, ``heavy``, ``accumulate:4``.
Rank r writes OUTPUT.r: a JSON list of what each chapter truly took by a stopwatch of the script's own.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

BATCH = 8


class Delay:
    """What the current chapter makes late, and for how long it truly did."""

    def __init__(self) -> None:
        self.phase = ""
        self.seconds = 0.0
        self.slept_s = 0.0

    def at(self, phase: str) -> None:
        if phase == self.phase and self.seconds:
            started_s = time.perf_counter()
            time.sleep(self.seconds)
            self.slept_s += time.perf_counter() - started_s


DELAY = Delay()


class Samples(Dataset):  # type: ignore[misc]
    def __init__(self, length: int, width: int) -> None:
        self.length = length
        self.width = width

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        # Rank r draws every second sample: this is the first of a batch.
        if index // 2 % BATCH == 0:
            DELAY.at("data_wait")
        return torch.full((self.width,), 0.01 * (index % 7))


class LateBackward(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        DELAY.at("backward")
        return gradient


class Net(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        DELAY.at("forward")
        # Its backward comes before any gradient is ready, so that no bucket is on its way while it sleeps.
        return LateBackward.apply(self.layers(value))


class LateOptimizer(torch.optim.SGD):  # type: ignore[misc]
    def step(self, closure: Any = None) -> Any:
        DELAY.at("optimizer")
        return super().step(closure)


def slow_link(ns_per_byte: float) -> Any:
    """A communication hook after which gradients take so much longer."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch looks at the annotations
        tensor = bucket.buffer()

        def arrived(future: Any) -> torch.Tensor:
            started_s = time.perf_counter()
            time.sleep(ns_per_byte * 1e-9 * tensor.numel() * tensor.element_size())
            DELAY.slept_s += time.perf_counter() - started_s
            return tensor.div_(dist.get_world_size())

        return dist.all_reduce(tensor, async_op=True).get_future().then(arrived)

    return hook


def chapter(spec: str, steps: int) -> dict[str, Any]:
    name, *values = spec.split(":")
    width, layers, batch, micro_batches = 64, 2, BATCH, 1
    late_rank = dist.get_rank() == 1
    DELAY.phase, DELAY.seconds, DELAY.slept_s = "", 0.0, 0.0
    if name == "late" and late_rank:
        DELAY.phase, DELAY.seconds = values[0], float(values[1]) / 1e3
    elif name == "loader":
        DELAY.phase, DELAY.seconds = "data_wait", float(values[0]) / 1e3
    elif name == "barrier" and late_rank:
        DELAY.phase, DELAY.seconds = "other", float(values[0]) / 1e3
    elif name == "wide":
        width, layers, batch = 1_500, 3, 1
    elif name == "heavy":
        width, layers, batch = 512, 3, 1_536
    elif name == "link":
        width, layers = 1_000, 1
    elif name == "accumulate":
        micro_batches = int(values[0])
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(width, layers), bucket_cap_mb=1_000 if name == "link" else None)
    if name == "link":
        model.register_comm_hook(None, slow_link(float(values[0])))
    optimizer = LateOptimizer(model.parameters(), lr=1e-4)
    samples = Samples(steps * micro_batches * batch * 2, width)
    sampler: Any = torch.utils.data.DistributedSampler(samples, shuffle=False)
    loader = DataLoader(samples, batch_size=batch, sampler=sampler)
    seen = 0
    dist.barrier()
    started_s = time.perf_counter()
    for number, inputs in enumerate(loader, 1):
        last = number % micro_batches == 0
        seen += len(inputs)
        with nullcontext() if last else model.no_sync():
            model(inputs).square().mean().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
            if name == "barrier":
                DELAY.at("other")
                dist.barrier()
    seconds = time.perf_counter() - started_s
    return {
        "spec": spec,
        "steps": steps,
        "seconds": seconds,
        "samples": seen,
        "slept_s": DELAY.slept_s,
        "bytes": sum(parameter.numel() * 4 for parameter in model.parameters()),
    }


def main() -> None:
    output, steps, *specs = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    told = [chapter(spec, int(steps)) for spec in specs]
    with open(f"{output}.{dist.get_rank()}", "w", encoding="utf-8") as file:
        json.dump(told, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
