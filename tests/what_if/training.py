"""Trains in chapters, each a job of its own with another model, and writes down how long a step took.

Usage: training.py OUTPUT STEPS CHAPTER...

A chapter is a job and its changes, ``comm``, ``comm:bucket_cap_mb=1``. Computation is sleep, so that ranks that share
cores do not compete; in jobs with ``busy`` or ``busy_fetch`` it takes a core. The links of jobs with ``ns_per_byte``
are emulated: a hook lets the ranks meet over gloo for each bucket, in a thread of its own and one after the other, and
sleeps for what a ring would take to send it; gradients are not averaged. Rank r writes OUTPUT.r.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import sys
import threading
import time
from contextlib import nullcontext, suppress
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WARM_UP = 4
"""Steps of a chapter that are not timed: a new model, a new loader, buckets that are rebuilt."""
HICCUP = 2.0
"""A step that takes so many times the median is not counted, as in a prediction."""
BATCH = 8
JOBS: dict[str, dict[str, Any]] = {
    # Gradients take longer than the computation of backward.
    "comm": {"width": 512, "layers": 8, "forward_ms": 10, "layer_ms": 5, "bucket_cap_mb": 2, "ns_per_byte": 8},
    # A batch takes longer to fetch than the step to compute.
    "input": {"width": 128, "layers": 4, "forward_ms": 10, "layer_ms": 5, "fetch_ms": 50, "ns_per_byte": 20},
    # The last rank computes longer than the others.
    "late": {"width": 256, "layers": 6, "forward_ms": 12, "layer_ms": 4, "late_ms": 35, "ns_per_byte": 20},
    # Many small parameters in many buckets, and many small collectives, over gloo as it is.
    "small": {
        "width": 24, "layers": 60, "forward_ms": 30, "layer_ms": 0.5, "bucket_cap_mb": 0.01, "reduces": 10,
        "buffers": 20,
    },
    # Four micro-batches to a step, each of which reduces its gradients.
    "accumulate": {
        "width": 384, "layers": 6, "forward_ms": 6, "layer_ms": 3, "micro": 4, "sync_all": True, "bucket_cap_mb": 1,
        "ns_per_byte": 15,
    },
    # Links of little bandwidth and of much latency: few buckets are best, and many.
    "near": {"width": 768, "layers": 8, "forward_ms": 8, "layer_ms": 6, "ns_per_byte": 2, "hop_ms": 0.1},
    "far": {"width": 512, "layers": 10, "forward_ms": 8, "layer_ms": 3, "ns_per_byte": 3, "hop_ms": 1},
    # Gradients over gloo as it is, beside computation that sleeps and beside one that takes the core.
    "gloo": {"width": 768, "layers": 8, "forward_ms": 8, "layer_ms": 5},
    "cores": {"width": 768, "layers": 8, "forward_ms": 8, "layer_ms": 4, "busy": True},
    # The same with a loss that is averaged in each step, which tells the latency of an all-reduce.
    "logged": {"width": 768, "layers": 8, "forward_ms": 8, "layer_ms": 5, "reduces": 1},
    "wide": {"width": 1024, "layers": 6, "forward_ms": 8, "layer_ms": 8, "reduces": 2},
    "narrow": {"width": 256, "layers": 30, "forward_ms": 8, "layer_ms": 1, "reduces": 1},
    "busy": {"width": 768, "layers": 8, "forward_ms": 8, "layer_ms": 4, "busy": True, "reduces": 1},
    # Batches that are decoded on a core, beside a computation that leaves it free (a GPU's) and one that does not.
    "decode": {"width": 128, "layers": 4, "forward_ms": 15, "layer_ms": 6, "fetch_ms": 30, "busy_fetch": True},
    "crowded": {
        "width": 128, "layers": 4, "forward_ms": 15, "layer_ms": 6, "fetch_ms": 30, "busy": True, "busy_fetch": True,
    },
    "disk": {"width": 128, "layers": 4, "forward_ms": 15, "layer_ms": 6, "fetch_ms": 30, "busy": True},
    # Batches that are soon there: workers bring little.
    "quick": {"width": 128, "layers": 4, "forward_ms": 15, "layer_ms": 6, "fetch_ms": 3, "busy_fetch": True},
}  # fmt: skip
HOP_MS = 0.3
"""Latency of a hop of the emulated ring, where a job names no other."""
CHUNK = bytes(1 << 16)


def take(own_ms: float, *, busy: bool) -> None:
    """Let so much time pass; ``busy`` on a core, as much of its time however many want it."""
    if not busy:
        time.sleep(own_ms / 1e3)
        return
    until_s = time.thread_time() + own_ms / 1e3
    while time.thread_time() < until_s:
        hashlib.sha256(CHUNK)  # Without the lock of the interpreter, as computations of torch are.


class Stream:
    """The one stream on which buckets are sent in their order."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.ns_per_byte = 0.0
        self.hop_ms = HOP_MS
        self.halves = False
        self.jobs: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        ranks, meeting = dist.get_world_size(), torch.zeros(1)
        while True:
            tensor, future = self.jobs.get()
            self.group.allreduce([meeting]).wait()
            size_bytes = tensor.numel() * tensor.element_size() * (0.5 if self.halves else 1.0)
            ring_ns = 2 * (ranks - 1) / ranks * size_bytes * self.ns_per_byte
            time.sleep(2 * (ranks - 1) * self.hop_ms / 1e3 + ring_ns / 1e9)
            future.set_result(tensor)

    def hook(self, state, bucket):  # type: ignore[no-untyped-def]  # torch looks at the annotations
        future: Any = torch.futures.Future()
        self.jobs.put((bucket.buffer(), future))
        return future


class Samples(Dataset):  # type: ignore[misc]
    def __init__(self, length: int, width: int, fetch_ms: float, busy: bool) -> None:
        self.length, self.width, self.fetch_ms, self.busy = length, width, fetch_ms, busy

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        take(self.fetch_ms / BATCH, busy=self.busy)
        return torch.full((self.width,), 0.01 * (index % 7))


class Slow(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(context: Any, value: torch.Tensor, layer_ms: float, busy: bool) -> torch.Tensor:
        context.layer_ms, context.busy = layer_ms, busy
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        take(context.layer_ms, busy=context.busy)
        return gradient, None, None


class Net(nn.Module):  # type: ignore[misc]
    def __init__(self, job: dict[str, Any], late: bool) -> None:
        super().__init__()
        width = job["width"]
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(job["layers"]))
        self.forward_ms = job["forward_ms"] + (job.get("late_ms", 0) if late else 0)
        self.layer_ms = job["layer_ms"]
        self.busy = bool(job.get("busy"))
        for number in range(job.get("buffers", 0)):
            self.register_buffer(f"constant_{number}", torch.ones(4_000 + number))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        take(self.forward_ms, busy=self.busy)
        for layer in self.layers:
            value = Slow.apply(layer(value), self.layer_ms, self.busy)
        return value


def job_of(spec: str) -> dict[str, Any]:
    """The parameters of a chapter: those of its job with its changes."""
    name, _, words = spec.partition(":")
    job = {"accumulation": None, "workers": 0, **JOBS[name]}
    for word in filter(None, words.split(",")):
        setting, value = word.split("=")
        if setting == "straggler":
            job["late_ms"] = 0
        elif setting == "link_speed":
            job["ns_per_byte"] /= float(value)
        elif setting == "hook":
            job["halves"] = True
        elif setting == "collectives":
            job["reduces"] = 1 if value == "batched" else 0
        elif setting == "broadcast_buffers":
            job["no_buffers"] = True
        elif setting == "accumulation":
            job["micro"], job["sync_all"] = int(value), False
        elif setting == "workers":
            job["workers"] = int(value)
        elif setting != "ranks":
            job[setting] = float(value)
    return job


def chapter(spec: str, steps: int, stream: Stream) -> dict[str, Any]:
    job = job_of(spec)
    micro, rank, world_size = job.get("micro", 1), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        Net(job, rank == world_size - 1),
        bucket_cap_mb=job.get("bucket_cap_mb"),
        **({"forward_sync_buffers": False} if job.get("no_buffers") else {}),
    )
    if "ns_per_byte" in job:
        stream.ns_per_byte, stream.halves = job["ns_per_byte"], job.get("halves", False)
        stream.hop_ms = job.get("hop_ms", HOP_MS)
        model.register_comm_hook(None, stream.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    length = steps * micro * BATCH * world_size
    samples = Samples(length, job["width"], job.get("fetch_ms", 0), bool(job.get("busy_fetch")))
    loader = DataLoader(samples, batch_size=BATCH, sampler=DistributedSampler(samples), num_workers=job["workers"])
    logged = torch.zeros(1)
    ends = []
    dist.barrier()
    for number, inputs in enumerate(loader, 1):
        is_last = number % micro == 0
        with nullcontext() if is_last or job.get("sync_all") else model.no_sync():
            model(inputs).square().mean().backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(job.get("reduces", 0)):
                dist.all_reduce(logged)
            ends.append(time.perf_counter())
    dist.barrier()
    steps_s = [later - sooner for sooner, later in pairwise(ends[WARM_UP - 1 :])]
    step_s = fmean(own for own in steps_s if own <= HICCUP * median(steps_s))
    return {"spec": spec, "step_s": step_s, "micro": micro}


def main() -> None:
    output, steps, *specs = sys.argv[1:]
    torch.set_num_threads(1)
    if not any(job_of(spec).get("busy") or job_of(spec).get("busy_fetch") for spec in specs):
        with suppress(PermissionError):
            # Ranks that sleep have to wake up in time on a machine that does other things as well.
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    dist.init_process_group("gloo")
    stream = Stream(dist.new_group())
    told = [chapter(spec, int(steps), stream) for spec in specs]
    with open(f"{output}.{dist.get_rank()}", "w", encoding="utf-8") as file:
        json.dump(told, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
