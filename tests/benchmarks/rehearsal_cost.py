"""What a rehearsal costs: ``ddpdoctor check`` of a healthy script against ``torchrun`` of the same number of steps.

``python -m tests.benchmarks.rehearsal_cost`` prints the medians of 3 runs each, interleaved, and the ratio; it exits
with 1 when the rehearsal takes more than 1.5 times as long plus 2 s, or when the comparison with one process that
follows takes more than 1.3 times as long as the rehearsal before it, by the seconds that the report states of both.

The script is timed with the number of steps that the rehearsal reports: a loop over its training step, stopped after
that number, which ``STEPS_AS_REHEARSED`` makes of the same script without an edit.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.scratch import scratch_directory

RUNS = 3
FACTOR = 1.5
ALLOWANCE_S = 2.0
COMPARISON_FACTOR = 1.3
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "healthy.py"

STEPS_AS_REHEARSED = """\
import os, runpy, sys, torch
left = int(os.environ["BENCHMARK_STEPS"])
def stop(optimizer, args, kwargs):
    global left
    left -= 1
    if left <= 0:
        os._exit(0)
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(stop)
script = sys.argv[1]
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(script)
runpy.run_path(script, run_name="__main__")
"""
"""Runs a script and leaves after as many optimizer steps as the rehearsal made."""


def check_once(directory: Path, option: str) -> Any:
    """Check in ``directory``; returns the report."""
    done = subprocess.run(
        (sys.executable, "-m", "ddpdoctor", "check", option, "--output-format", "json", str(SCRIPT)),
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    report = json.loads(done.stdout)
    if report["rehearsal"]["status"] != "completed":
        raise SystemExit(f"the rehearsal did not complete: {report['rehearsal']}")
    return report


def rehearse_once(directory: Path) -> tuple[float, int]:
    """Rehearse in ``directory``; returns wall seconds and steps per rank."""
    started_s = time.perf_counter()
    report = check_once(directory, "--no-equivalence")
    return time.perf_counter() - started_s, int(report["rehearsal"]["steps"])


def compare_once(directory: Path) -> float:
    """Rehearse and compare in ``directory``; returns how many times as long the comparison took."""
    report = check_once(directory, "--equivalence")
    if report["equivalence"]["status"] != "equal":
        raise SystemExit(f"the comparison tells nothing: {report['equivalence']}")
    return float(report["equivalence"]["seconds"]) / float(report["rehearsal"]["seconds"])


def launch_once(directory: Path, steps: int) -> float:
    """Launch the script with torchrun in ``directory`` for ``steps`` steps; returns wall seconds."""
    runner = directory / "stop_after_steps.py"
    runner.write_text(STEPS_AS_REHEARSED)
    started_s = time.perf_counter()
    subprocess.run(
        (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", runner, SCRIPT),
        cwd=directory,
        env=os.environ | {"BENCHMARK_STEPS": str(steps), "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        timeout=300,
    )
    return time.perf_counter() - started_s


def main() -> int:
    """Print the two medians and their ratio; 1 when the bound is exceeded."""
    with scratch_directory() as directory:
        steps = rehearse_once(directory)[1]
        launch_once(directory, steps)
        pairs = [(rehearse_once(directory)[0], launch_once(directory, steps)) for _ in range(RUNS)]
        comparison = statistics.median(compare_once(directory) for _ in range(RUNS))
    rehearsal_s, launch_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    bound_s = FACTOR * launch_s + ALLOWANCE_S
    print(f"rehearsal of {SCRIPT.name}, {steps} steps on 2 ranks, median of {RUNS}")
    print(f"  torchrun         {launch_s:6.2f} s")
    print(f"  ddpdoctor check  {rehearsal_s:6.2f} s  {rehearsal_s / launch_s:5.2f} x  (at most {bound_s:.2f} s)")
    print(f"  compared with one process, beside its rehearsal  {comparison:5.2f} x  (at most {COMPARISON_FACTOR} x)")
    return int(rehearsal_s > bound_s or comparison > COMPARISON_FACTOR)


if __name__ == "__main__":
    sys.exit(main())
