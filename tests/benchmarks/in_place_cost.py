"""What the hooks of a live run cost a training step in place: ``python -m tests.benchmarks.in_place_cost``.

Functions that do nothing leave the hooks in the processor's caches; a training step drives them out. So one process
trains one model on one rank, in short blocks with torch's own functions and with those that the probe puts in their
place, in the order off, on, on, off. Measured is the CPU time of the training thread, which other processes hardly
touch; the cost is the median over such rounds of what "on" takes more than "off", with a bootstrap interval of 95 %.
Every second round is a null control, with the hooks off throughout: what it says is the error of the method.

The process's CPU is told as well: what the heartbeat's thread does takes the GIL from the training thread.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from tests.scratch import scratch_directory

ROUNDS = 300
BLOCK_NS = 20_000_000
WARM_UP_STEPS = 3
"""Steps of a block that do not count: the classes have just been changed."""
BEFORE_STEPS = 300
"""Steps with the hooks before the first block: what is noted of the first few is noted by then."""
ALLOWED_US = 20.0
RESAMPLED = 1_000
TORCHS_OWN_RATE = 100
"""DDP's logger measures one iteration in so many unless it is told otherwise."""
COLUMNS = ("training thread", "its usual step", "process")


class Job(msgspec.Struct, frozen=True):
    """A training."""

    name: str
    width: int
    layers: int
    batch: int
    buffers: bool
    short_passes: int = 3
    """Passes over the loader before the one that is measured: of the first two the indices are kept."""


JOBS = (
    Job("without buffers", width=64, layers=3, batch=16, buffers=False),
    Job("with buffers", width=64, layers=3, batch=16, buffers=True),
    Job("longer steps", width=512, layers=4, batch=32, buffers=False),
    Job("in the first pass", width=64, layers=3, batch=16, buffers=False, short_passes=0),
)


class Endless:
    """A sampler of so many passes of 64 indices, and of one that does not end."""

    def __init__(self, length: int, short_passes: int) -> None:
        self._length = length
        self._short_passes = short_passes

    def __iter__(self) -> Iterator[int]:
        self._short_passes -= 1
        number = 0
        while self._short_passes < 0 or number < 64:
            yield number % self._length
            number += 1

    def __len__(self) -> int:
        return self._length


class Switch:
    """Puts torch's own functions back and the probe's in again, with the rate of DDP's logger."""

    def __init__(self, torch: Any) -> None:
        distributed, optimizers = torch.distributed, sys.modules["torch.optim.optimizer"]
        self._owners = (
            torch,
            torch.autograd,
            torch.utils.data.dataloader._BaseDataLoaderIter,
            torch.utils.data.DataLoader,
            torch.nn.parallel.DistributedDataParallel,
            torch.optim.Optimizer,
            distributed,
            distributed.distributed_c10d,
            distributed.distributed_c10d.Work,
        )
        self._hooks: Any = (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
        self._own = [dict(vars(owner)) for owner in self._owners]
        self._put_in: list[tuple[Any, str, Any, Any]] = []
        self._registered: list[dict[int, Any]] = []

    def learn(self) -> None:
        """The hooks that are in place now are those of the probe."""
        for owner, own in zip(self._owners, self._own, strict=True):
            for name, value in vars(owner).items():
                if name in own and own[name] is not value and getattr(value, "__wrapped__", None) is own[name]:
                    self._put_in.append((owner, name, own[name], value))
        self._registered = [dict(hooks) for hooks in self._hooks]
        if len(self._put_in) < 5:
            raise SystemExit(f"the probe has replaced no more than {[name for _, name, _, _ in self._put_in]}")

    def turn(self, *, on: bool) -> None:
        """Have the next steps made with the hooks or without."""
        for owner, name, own, replacement in self._put_in:
            setattr(owner, name, replacement if on else own)
        for hooks, registered in zip(self._hooks, self._registered, strict=True):
            hooks.clear()
            hooks.update(registered if on else {})


class Training:
    """One model in training, under a probe that can be switched off."""

    def __init__(self, job: Job, directory: Path) -> None:
        import torch
        import torch.distributed as dist

        from ddpdoctor.probe.journal import Journal
        from ddpdoctor.probe.live.install import Live
        from ddpdoctor.probe.process import ProcessEnd

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._switch = Switch(torch)
        journal = Journal(str(directory), {"project_root": str(Path(__file__).parents[2]), "kind": "run"})
        self.live = Live(journal, ProcessEnd(journal))
        self.live.after_torch(torch)
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        nn, width = torch.nn, job.width
        norm: Any = nn.BatchNorm1d if job.buffers else nn.LayerNorm
        layers = [layer for _ in range(job.layers) for layer in (nn.Linear(width, width), norm(width), nn.ReLU())]
        self._model: Any = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
        self._optimizer = torch.optim.SGD(self._model.parameters(), 0.001)
        self._loss = nn.functional.mse_loss
        data = torch.utils.data.TensorDataset(torch.randn(1024, width), torch.randn(1024, width))
        sampler: Any = Endless(len(data), short_passes=job.short_passes)
        self._source = self._batches(torch.utils.data.DataLoader(data, job.batch, sampler=sampler))
        self._torch = torch
        for _ in range(BEFORE_STEPS):
            self.step()
        self._switch.learn()
        began_ns = time.thread_time_ns()
        for _ in range(50):
            self.step()
        self.steps = max(5, BLOCK_NS * 50 // (time.thread_time_ns() - began_ns))

    def step(self) -> None:
        """What a usual loop does."""
        inputs, targets = next(self._source)
        self._optimizer.zero_grad()
        loss = self._loss(self._model(inputs), targets)
        loss.backward()
        self._optimizer.step()

    def block(self, *, on: bool) -> tuple[float, ...]:
        """Microseconds of CPU a step: mean and median of the training thread, mean of the process."""
        self._switch.turn(on=on)
        assert self.live._training is not None
        reducer = self.live._training._reductions.known[id(self._model)]
        self._model._set_ddp_runtime_logging_sample_rate(reducer.rate if on else TORCHS_OWN_RATE)
        for _ in range(WARM_UP_STEPS):
            self.step()
        process_ns, now_ns = time.process_time_ns(), time.thread_time_ns
        marks = [now_ns()]
        for _ in range(self.steps):
            self.step()
            marks.append(now_ns())
        process_us = (time.process_time_ns() - process_ns) / self.steps / 1e3
        if not on and reducer.offset is not None:
            reducer.offset += self.steps + WARM_UP_STEPS  # The logger has counted them.
        took_ns = [end - begin for begin, end in pairwise(marks)]
        return statistics.mean(took_ns) / 1e3, statistics.median(took_ns) / 1e3, process_us

    def close(self) -> None:
        """End the group, with torch's own functions in place."""
        self.live.stop()
        self._switch.turn(on=False)
        self._torch.distributed.destroy_process_group()

    def _batches(self, loader: Any) -> Iterator[Any]:
        while True:
            yield from loader


Round = tuple[float, ...]
"""What a step takes more with the hooks, by column."""


def make_round(training: Training, *, on: bool, inside: bool) -> tuple[Round, Round]:
    """Four blocks: the difference, and what a step takes without the hooks; ``inside`` has the hooks in the middle."""
    taken = [training.block(on=on and middle == inside) for middle in (False, True, True, False)]
    outer = [statistics.mean(pair) for pair in zip(taken[0], taken[3], strict=True)]
    inner = [statistics.mean(pair) for pair in zip(taken[1], taken[2], strict=True)]
    within, without = (inner, outer) if inside else (outer, inner)
    return tuple(more - less for more, less in zip(within, without, strict=True)), tuple(without)


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Median, and the ends of its 95 % interval by bootstrap."""
    lots = random.Random(0)
    medians = sorted(statistics.median(lots.choices(differences, k=len(differences))) for _ in range(RESAMPLED))
    return statistics.median(differences), medians[RESAMPLED // 40], medians[-1 - RESAMPLED // 40]


def measure(job: Job, rounds: int) -> float:
    """Print what the hooks cost one job; the lower end for the training thread."""
    with scratch_directory() as directory:
        training = Training(job, directory)
        made = [make_round(training, on=number % 2 == 0, inside=number % 4 < 2) for number in range(2 * rounds)]
        completed = training.live.observer.steps.completed
        training.close()
    if completed < 2 * rounds * training.steps:
        raise SystemExit(f"the probe counted {completed:,} steps, fewer than were made with the hooks on")
    without = [statistics.median(taken[1][column] for taken in made) for column in range(len(COLUMNS))]
    print(f"{job.name}: a step of {without[0] / 1e3:.2f} ms, {rounds} rounds of 4 blocks of {training.steps} steps")
    lowest = 0.0
    for name, rest in (("hooks", 0), ("control", 1)):
        for column, of in enumerate(COLUMNS):
            median, low, high = interval([difference[column] for difference, _ in made[rest::2]])
            print(f"  {name:8} {of:16} {median:7.1f} µs a step  ({low:6.1f} to {high:6.1f})", flush=True)
            if not rest and not column:
                lowest = low
    return lowest


def main(arguments: Sequence[str] = ()) -> int:
    """Print what was measured; 1 when a bound is exceeded."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--job", type=int, choices=range(len(JOBS)), default=0)
    options = parser.parse_args(arguments)
    low = measure(JOBS[options.job], options.rounds)
    print(f"  allowed: {ALLOWED_US:g} µs of the training thread for the lower end")
    return int(low > ALLOWED_US)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
