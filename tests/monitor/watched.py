"""Starts small jobs under plain torchrun with nothing but the environment set."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from ddpdoctor.launch.environment import observed
from ddpdoctor.monitor.live_run import LiveRun
from ddpdoctor.record.assembly.assemble import Assembly
from ddpdoctor.record.model import Job, RunRecord
from ddpdoctor.record.reader import RunPlan

MOST_S = 200

HEAD = """
import json, os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
"""


@contextmanager
def job(folder: Path, body: str, head: str = HEAD) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Two ranks that run the script; its process and the run directory. What is left of it is killed at the end."""
    script, run = folder / "train.py", folder / "run"
    script.write_text(head + textwrap.dedent(body))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment | observed(run, environment), stdout=output, stderr=output
        )
    try:
        yield process, run
    finally:
        for path in run.glob("events-*.jsonl"):
            with suppress(psutil.Error):
                rank = psutil.Process(int(path.stem.partition("-")[2]))
                # A worker of a loader that hangs does not see that its rank is gone.
                for one in (*rank.children(recursive=True), rank):
                    with suppress(psutil.Error):
                        one.kill()
        process.kill()
        process.wait()


def finished(folder: Path, body: str) -> RunRecord:
    """The record of a job that has run to its end."""
    with job(folder, body) as (process, run):
        code = process.wait(MOST_S)
        assert code == 0, (folder / "output").read_text()
        assembly = Assembly(run)
        assembly.poll()
        assembly.poll()
        assert assembly.faults == []
        return assembly.record(Job(kind="run", world_size=2))


def watch(run: Path, until: Callable[[LiveRun, RunRecord], bool]) -> tuple[LiveRun, RunRecord]:
    """Look at a run again and again until something is so; fails when it never is."""
    deadline = time.monotonic() + MOST_S
    while not (run / "job.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    live = LiveRun(run, RunPlan(job=Job(kind="run")))
    while time.monotonic() < deadline:
        record = live.look(time.time_ns())
        if until(live, record):
            return live, record
        time.sleep(0.1)
    raise AssertionError(f"it did not come to that: {record.heartbeats}")
