"""What the digests of the parameters cost a training: ``python -m tests.benchmarks.replica_cost``.

A DDP module of one rank makes real steps. Of 100 steps three do more for the digests than count: the one before a look,
the look, and the one that writes what was seen. Measured is the CPU time of the calling thread for three such steps,
with the counting of the other 97, and for three plain steps, in pairs whose order alternates; the difference is told as
a share of 100 plain steps. The median of the pairs counts, for a machine that is busy drifts, with the interval that
holds the true one in 97 of 100 measurements.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from tests.scratch import scratch_directory

PAIRS = 201
INTERVAL = (84, 116)
"""Of 201 values in their order the 85th and the 117th enclose the median with 97 %."""
ALLOWED = 0.005


def models() -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """Yield a name, a model, and the shape of its batches."""
    from torch import nn

    small = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    blocks = [part for _ in range(15) for part in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())]
    large = [part for _ in range(4) for part in (nn.Linear(512, 512), nn.LayerNorm(512), nn.ReLU())]
    yield "6 parameters, 26 thousand numbers", nn.Sequential(*small), (64, 64)
    yield "60 parameters, 35 thousand numbers", nn.Sequential(*blocks), (8, 16, 8, 8)
    yield "16 parameters, a million numbers", nn.Sequential(*large), (64, 512)


def measure(model: Any, shape: tuple[int, ...], directory: Path) -> tuple[list[float], float]:
    """Return what each pair tells of the cost, as a share, and the milliseconds of a step."""
    import torch

    from ddpdoctor.probe.journal import Journal
    from ddpdoctor.probe.live.reductions import EVERY, Reducer, ReplicaDigests

    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters())
    batch = torch.randn(shape)
    journal = Journal(str(directory), {"project_root": str(directory)})
    journal.rank = 0
    reducer = Reducer(0, 1, on_gpu=False)

    def step() -> None:
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
        reducer.forwards += 1

    def count(seen: ReplicaDigests) -> None:
        seen.steps += 1
        if seen.steps >= seen.next_look:
            seen.look()

    def three(*, digests: bool) -> float:
        seen = ReplicaDigests(journal, torch, lambda _: 0, lambda: [(ddp, reducer)])
        began_ns = time.thread_time_ns()
        for _ in range(EVERY - 2 if digests else 0):
            count(seen)
        for _ in range(3):
            step()
            if digests:
                count(seen)
        return float(time.thread_time_ns() - began_ns)

    three(digests=True)
    more, plain = [], []
    for number in range(PAIRS):
        first, second = three(digests=bool(number % 2)), three(digests=not number % 2)
        with_them, without = (first, second) if number % 2 else (second, first)
        more.append(with_them - without)
        plain.append(without)
    step_ns = median(plain) / 3
    return [one / (EVERY * step_ns) for one in more], step_ns / 1e6


def main() -> int:
    """Print what was measured; 1 when a median is above the bound."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dear = 0
    with scratch_directory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        for name, model, shape in models():
            shares, step_ms = measure(model, shape, directory)
            ordered = sorted(shares)
            low, high = (ordered[at] for at in INTERVAL)
            print(f"  {name}, {step_ms:.2f} ms a step: {median(shares):.3%} ({low:.3%} to {high:.3%})")
            dear += median(shares) > ALLOWED
        dist.destroy_process_group()
    return int(dear > 0)


if __name__ == "__main__":
    sys.exit(main())
