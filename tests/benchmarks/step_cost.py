"""What a watched job costs a training step: ``python -m tests.benchmarks.step_cost [--pairs N]``.

Whole jobs of one rank are run in pairs, one plain and one under ``ddpdoctor profile``: a usual loop over a
``DataLoader`` in steps of about 1 ms. The two of a pair run at the same time, so that both meet what else the machine
does. Measured is the CPU time of the training's main thread around the whole loop, first steps included, and its median
step. The cost is the median of the differences of the pairs, with a bootstrap interval of 95 %. A second job has no
loader.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.scratch import scratch_directory

PAIRS = 41
STEPS = 1_500
ALLOWED_US = 45.0
RESAMPLED = 1_000
_JOB = """
import statistics, sys, time
import torch
from torch import distributed, nn
store, with_loader, steps = sys.argv[1], sys.argv[2] == "loader", int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
layers = [layer for _ in range(4) for layer in (nn.Linear(352, 352), nn.ReLU())]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = torch.utils.data.TensorDataset(torch.randn(16 * steps, 352), torch.randn(16 * steps, 352))
if with_loader:
    batches = torch.utils.data.DataLoader(data, 16, shuffle=True)
else:
    batches = (data[16 * number : 16 * number + 16] for number in range(steps))
now_ns = time.thread_time_ns
marks = [now_ns()]
for inputs, targets in batches:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    marks.append(now_ns())
took_ns = [end - begin for begin, end in zip(marks, marks[1:])]
print("TOOK", statistics.mean(took_ns) / 1e3, statistics.median(took_ns) / 1e3)
"""


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Median, and the ends of its 95 % interval by bootstrap."""
    lots = random.Random(0)
    medians = sorted(statistics.median(lots.choices(differences, k=len(differences))) for _ in range(RESAMPLED))
    return statistics.median(differences), medians[RESAMPLED // 40], medians[-1 - RESAMPLED // 40]


def start_job(directory: Path, loader: str, *, watches: bool) -> subprocess.Popen[str]:
    """Start a whole job."""
    store = directory / f"store-{watches}"
    store.unlink(missing_ok=True)
    command = [sys.executable, str(directory / "job.py"), str(store), loader, str(STEPS)]
    if watches:
        command = [sys.executable, "-m", "ddpdoctor", "profile", "--no-tui", "--", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(directory / "state")}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def microseconds_of(job: subprocess.Popen[str]) -> list[float]:
    """Mean and median CPU time of a step, once the job is over."""
    printed, _ = job.communicate(timeout=600)
    told = [line for line in printed.splitlines() if line.startswith("TOOK")]
    if not told:
        raise SystemExit(printed)
    return [float(figure) for figure in told[0].split()[1:]]


def measure(loader: str, pairs: int) -> float:
    """Print what a step of a job takes more when it is watched; the lower end of the interval of the mean."""
    taken = []
    with scratch_directory() as directory:
        (directory / "job.py").write_text(_JOB)
        for number in range(pairs):
            order = (False, True) if number % 2 else (True, False)
            jobs = {watches: start_job(directory, loader, watches=watches) for watches in order}
            taken.append({watches: microseconds_of(job) for watches, job in jobs.items()})
            more_us = taken[-1][True][0] - taken[-1][False][0]
            print(f"  pair {number + 1}: {more_us:.1f} µs", file=sys.stderr, flush=True)
    lows = []
    for column, name in enumerate(("mean", "median step")):
        median, low, high = interval([pair[True][column] - pair[False][column] for pair in taken])
        plain_us = statistics.median(pair[False][column] for pair in taken)
        print(f"{loader:10} {name:12} {median:6.1f} µs ({low:.1f} to {high:.1f}) of {plain_us:.0f}, {pairs} pairs")
        lows.append(low)
    sys.stdout.flush()
    return lows[0]


def main(arguments: Sequence[str] = ()) -> int:
    """Print what was measured; 1 when the bound is exceeded with a loader."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=PAIRS)
    chosen = parser.parse_args(arguments)
    print("CPU time of the training thread that profile adds, pairs of whole jobs of one rank")
    low = measure("loader", chosen.pairs)
    measure("no loader", chosen.pairs)
    print(f"  allowed: {ALLOWED_US:g} µs with a loader, for the lower end")
    return int(low > ALLOWED_US)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
