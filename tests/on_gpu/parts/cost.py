"""What it costs a training to be watched, in pairs of whole jobs, one plain and one watched, with the same weights."""

from __future__ import annotations

from statistics import median
from typing import Any

from tests.benchmarks.step_cost import ALLOWED_US, interval
from tests.on_gpu.claims import Bench, Claim
from tests.on_gpu.runs import Job

LIMIT_S = 240.0
PAIRS = 5
SMALL, LARGE = 1_500, 150
MOST_GPU_SHARE = 0.005
CLAIMS = {
    "bits": Claim("the weights of a watched training are those of a plain one", "the same bits", pretends=True),
    "cpu": Claim("a watched step costs its main thread little", f"at most {ALLOWED_US:g} µs", pretends=True),
    "gpu": Claim("the GPU takes no longer for a watched step", f"at most {MOST_GPU_SHARE:.1%} more"),
}


def measure(bench: Bench) -> None:
    """Judge the claims."""
    pairs = [_pair(bench, number) for number in range(1 if bench.pretends else PAIRS)]
    digests = {truth["digest"] for pair in pairs for truth in pair.values()}
    bench.judge("bits", len(digests) == 1, f"{len(digests)} digest(s) in {2 * len(pairs)} runs")
    more_us = [pair[True]["small_cpu_us"] - pair[False]["small_cpu_us"] for pair in pairs]
    middle, low, high = interval(more_us)
    # One pair on a machine that does other things: the bound is so wide that only a fault of kind crosses it.
    most_us = 60 * ALLOWED_US if bench.pretends else ALLOWED_US
    bench.judge(
        "cpu",
        low <= most_us,
        f"{middle:.1f} µs ({low:.1f} to {high:.1f}, {len(pairs)} pairs)",
        expected=f"at most {most_us:g} µs",
        note=f"of {median(pair[False]['small_cpu_us'] for pair in pairs):.0f} µs",
    )
    if not bench.pretends:
        shares = [pair[True]["large_gpu_ms"] / pair[False]["large_gpu_ms"] - 1 for pair in pairs]
        middle, low, high = interval(shares)
        bench.judge("gpu", low <= MOST_GPU_SHARE, f"{middle:+.2%} ({low:+.2%} to {high:+.2%}, {len(pairs)} pairs)")


def _pair(bench: Bench, number: int) -> dict[bool, dict[str, Any]]:
    """Run two jobs one after the other, for on one GPU each would take the other's time; the order changes."""
    sizes = (200, 20) if bench.pretends else (SMALL, LARGE)
    found = {}
    for watched in (False, True) if number % 2 == 0 else (True, False):
        folder = bench.folder / f"{number}-{'watched' if watched else 'plain'}"
        job = Job(folder, "cost", *sizes, watched=watched, variables={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
        found[watched] = job.ended().truth()
    return found
