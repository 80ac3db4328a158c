"""What observation costs a training step: the same script with and without the probe, and under two other tools.

``python -m tests.benchmarks.profile_cost`` runs the script several times at once, all but one of them stopped, and has
them make blocks of steps in turn: plain, observed, plain again (the null control) in an order drawn by lot, and back in
the opposite order; in the rounds of some generations torch.profiler and TraceML, too.

No two processes are equally fast: where their memory lies alone makes a step of the same script some percent longer or
shorter, for as long as the process lives. So the processes are started anew many times, and a generation is what
counts once: the median over its rounds. Printed is the median over the generations with its 95 % interval (of order
statistics, which no single disturbance moves). The benchmark exits with 1 when the lower end of the wall time is above
0.5 % of a step of 10 ms. ``--blocks N``, ``--generations N`` and ``--ranks N`` change the size.

TraceML is run when ``--traceml PYTHON`` names an interpreter that has it, or when it can be installed into an
environment of its own; otherwise the benchmark says that it was left out.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from ddpdoctor.launch.environment import observed
from ddpdoctor.probe.environment import free_port
from tests.scratch import scratch_directory

BLOCKS = 200
STEPS = 5
GENERATIONS = 20
"""How often the processes are started."""
COMPARED_EVERY = 4
"""In each so many generations the other tools take part."""
ALLOWED_US = 50.0
"""0.5 % of a step of 10 ms."""
SCRIPT = Path(__file__).with_name("blocks_of_steps.py")
PATIENCE_S = 120
TRACEML = "traceml-ai==0.5.*"

Took = tuple[float, ...]
"""Microseconds a step: wall time, CPU of the training thread, CPU of the process."""


class Arm:
    """The script under one tool, stopped except while it makes a block."""

    def __init__(self, name: str, directory: Path, tool: str, launcher: Sequence[str], more: Mapping[str, str]) -> None:
        self.name = name
        directory.mkdir()
        for pipe in ("commands", "answers"):
            os.mkfifo(directory / pipe)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **more}
        self._log = (directory / "output").open("wb")
        self._process = subprocess.Popen(
            (*launcher, str(SCRIPT), *(("--args",) if tool == "traceml" else ()), str(directory), tool, str(STEPS)),
            env=environment,
            cwd=directory,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._directory = directory
        self._family: list[psutil.Process] = []

    def become_ready(self) -> None:
        """Wait until the script has started, let it warm up, and stop it."""
        self._commands: IO[str] = _opened(self._directory / "commands", "w")
        self._answers: IO[str] = _opened(self._directory / "answers", "r")
        for _ in range(4):  # buckets are rebuilt, memory is allocated
            self.block(running=True)
        # A tool's helpers may have sessions of their own.
        self._family = psutil.Process(self._process.pid).children(recursive=True)
        self._signal(signal.SIGSTOP)

    def block(self, *, running: bool = False) -> Took:
        """Make one block of steps."""
        if not running:
            self._signal(signal.SIGCONT)
        print("go", file=self._commands, flush=True)
        seconds = [float(word) for word in self._answers.readline().split()]
        if len(seconds) != 3:
            raise SystemExit(f"{self.name}: the script ended early: {Path(self._log.name).read_text()[-2000:]}")
        if not running:
            self._signal(signal.SIGSTOP)
        return tuple(second / STEPS * 1e6 for second in seconds)

    def close(self) -> None:
        """End the script."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _signal(self, number: int) -> None:
        for pid in (self._process.pid, *(child.pid for child in self._family)):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def _opened(pipe: Path, mode: str) -> IO[str]:
    """Open a pipe once the other side has; a process that ends before is an error."""
    signal.alarm(PATIENCE_S)
    try:
        return pipe.open(mode)
    finally:
        signal.alarm(0)


def torchrun(python: str, ranks: int) -> tuple[str, ...]:
    port = free_port()
    return (python, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={port}")


def traceml_python(directory: Path, named: str) -> str | None:
    """An interpreter with TraceML and our torch, in an environment of its own; None when it cannot be had."""
    if named:
        return named
    environment = directory / "traceml"
    python = environment / "bin" / "python"
    try:
        subprocess.run((sys.executable, "-m", "venv", environment), check=True, capture_output=True, timeout=120)
        import torch

        packages = next(environment.glob("lib/python*/site-packages"))
        (packages / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))
        install = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", TRACEML)
        subprocess.run(install, check=True, capture_output=True, timeout=300)
    except (OSError, subprocess.SubprocessError, StopIteration):
        return None
    return str(python)


def our_arms(directory: Path, ranks: int) -> list[Arm]:
    """Start the script with and without the probe."""
    python, run = sys.executable, directory / "run"
    run.mkdir(mode=0o700)
    (run / "job.json").write_text('{"version": 1, "kind": "run"}')
    watched = observed(run, os.environ)
    return [
        Arm("plain", directory / "plain", "none", torchrun(python, ranks), {}),
        Arm("ddpdoctor", directory / "observed", "none", torchrun(python, ranks), watched),
        Arm("plain again", directory / "again", "none", torchrun(python, ranks), {}),
    ]


def other_arms(directory: Path, ranks: int, traceml: str | None) -> list[Arm]:
    """Start the script under the tools that it is compared with."""
    arms = [Arm("torch.profiler", directory / "profiler", "torch.profiler", torchrun(sys.executable, ranks), {})]
    if traceml is not None:
        launcher = (str(Path(traceml).with_name("traceml")), "run", f"--nproc-per-node={ranks}", "--run-name=cost")
        more = {"PATH": f"{Path(traceml).parent}{os.pathsep}{os.environ['PATH']}"}
        ports = (f"--master-port={free_port()}", f"--aggregator-port={free_port()}")
        arms.append(Arm("TraceML", directory / "with-traceml", "traceml", (*launcher, *ports), more))
    return arms


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Median of the differences, and the ends of its 95 % interval by order statistics."""
    ordered, count = sorted(differences), len(differences)
    reach = 1.96 * math.sqrt(count) / 2
    low, high = max(0, math.floor(count / 2 - reach)), min(count - 1, math.ceil(count / 2 + reach))
    return statistics.median(ordered), ordered[low], ordered[high]


Round = Mapping[str, Took]
"""What each arm took, the mean of its two turns."""
Generation = Sequence[Round]
"""The rounds that the same processes made."""


def make_round(arms: Sequence[Arm], lots: random.Random) -> Round:
    """Have each arm make a block, in an order drawn by lot, and once more in the opposite order."""
    order = lots.sample(list(arms), len(arms))
    turns = [(arm.name, arm.block()) for arm in (*order, *reversed(order))]
    return {
        arm.name: tuple(
            sum(column) / 2 for column in zip(*(took for name, took in turns if name == arm.name), strict=True)
        )
        for arm in arms
    }


def measure(directory: Path, blocks: int, generations: int, ranks: int, traceml: str | None) -> list[Generation]:
    """All rounds of all generations."""
    lots = random.Random(0)
    made: list[Generation] = []
    for number in range(generations):
        room = directory / str(number)
        room.mkdir()
        arms: list[Arm] = []
        try:
            arms += our_arms(room, ranks)
            arms += other_arms(room, ranks, traceml) if number % COMPARED_EVERY == 0 else []
            for arm in arms:
                arm.become_ready()
            made.append([make_round(arms, lots) for _ in range(-(-blocks // generations))])
        finally:
            for arm in arms:
                arm.close()
    return made


def main(arguments: Sequence[str] = ()) -> int:
    """Print what was measured; 1 when a bound is exceeded."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--generations", type=int, default=GENERATIONS)
    parser.add_argument("--ranks", type=int, default=2 if (os.cpu_count() or 1) >= 4 else 1)
    parser.add_argument("--traceml", default="")
    options = parser.parse_args(arguments)
    with scratch_directory() as directory:
        traceml = traceml_python(directory, options.traceml)
        made = measure(directory, options.blocks, options.generations, options.ranks, traceml)
    return report(made, options.ranks, left_out=traceml is None)


def more_than_plain(made: Sequence[Generation], name: str, column: int) -> list[float]:
    """For each generation that the tool was in, how much longer its steps took than those of the script without any.

    The null control is held against the one plain script, everything else against both.
    """
    without = ("plain",) if name == "plain again" else ("plain", "plain again")
    return [
        statistics.median(took[name][column] - statistics.mean(took[one][column] for one in without) for took in rounds)
        for rounds in made
        if name in rounds[0]
    ]


def report(made: Sequence[Generation], ranks: int, *, left_out: bool) -> int:
    """Print the table; 1 when the bound is exceeded."""
    step_us = statistics.median(took["plain"][0] for rounds in made for took in rounds)
    print(
        f"a step of {step_us / 1e3:.2f} ms on {ranks} rank{'s' * (ranks > 1)}, {sum(map(len, made))} blocks of {STEPS} "
        f"steps by {len(made)} generations of processes;"
    )
    print("more per step than without anything, median and 95 % interval")
    print(f"  {'':16}{'wall time, µs':>28}{'':10}{'CPU of the training thread, µs':>36}")
    found: dict[str, list[tuple[float, float, float]]] = {}
    for name in ("ddpdoctor", "plain again", "torch.profiler", "TraceML"):
        if not any(name in rounds[0] for rounds in made):
            continue
        found[name] = [interval(more_than_plain(made, name, column)) for column in (0, 1)]
        (wall, low, high), (thread, thread_low, thread_high) = found[name]
        print(
            f"  {name:16}{wall:9.1f}  ({low:8.1f} to {high:8.1f}) {wall / step_us:7.2%}"
            f"{thread:12.1f}  ({thread_low:8.1f} to {thread_high:8.1f})"
        )
    ours = found["ddpdoctor"]
    for name in ("torch.profiler", "TraceML"):
        if name in found:
            print(f"  {name}: {_times(found[name][0], ours[0])} the wall time that ddpdoctor adds")
    if left_out:
        print("  TraceML was left out: it could not be installed")
    print(f"  allowed: {ALLOWED_US:g} µs of wall time for the lower end")
    return int(ours[0][1] > ALLOWED_US)


def _times(theirs: tuple[float, float, float], ours: tuple[float, float, float]) -> str:
    """A ratio of medians; a bound for it where ours cannot be told from nothing."""
    median, low, high = ours
    return f"{theirs[0] / median:.1f} times" if low > 0 else f"at least {theirs[0] / max(high, 1.0):.1f} times"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
