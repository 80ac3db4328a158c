"""How long a test on two ranks takes beyond its body, once the ranks are warm.

The bound is absolute, as a user feels it, on a machine that has a core for each rank. On a busy machine ten starts of
Python count instead; the CPU time that all processes use for a further test tells the cost whatever else runs.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.pytest_plugin.session import Session, run_pytest
from tests.scratch import scratch_directory

BOUND_S = 0.2
STARTS = 10
FEW, MANY = 10, 40
BODY = """
import pytest
TESTS = {}

@pytest.mark.ddp
@pytest.mark.parametrize("turn", range(TESTS))
def test_on_ranks(turn, ddp_rank):
    import torch.distributed as dist
    dist.barrier()

@pytest.mark.parametrize("turn", range(TESTS))
def test_here(turn): pass
"""


def run(tests: int) -> tuple[Session, float]:
    """A session of so many tests on ranks and as many without; and the CPU seconds of all its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with scratch_directory() as directory:
        (directory / "test_cost.py").write_text(BODY.format(tests))
        session = run_pytest(directory)
    assert session.code == 0, session.output
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return session, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Print the figures; 1 when the median of further tests exceeds its bound."""
    _, few_cpu_s = run(FEW)
    session, many_cpu_s = run(MANY)
    further = [session.seconds[f"test_on_ranks[{turn}]"] for turn in range(1, MANY)]
    here = [session.seconds[f"test_here[{turn}]"] for turn in range(MANY)]
    pure = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True, cwd=Path(__file__).parent)
        pure.append(time.perf_counter() - began)
    start_s = statistics.median(pure)
    over_s = statistics.median(further) - statistics.median(here)
    deciles = statistics.quantiles(further, n=10)
    print(f"pytest plugin: first test on 2 ranks {session.seconds['test_on_ranks[0]']:.1f} s (imports torch)")
    print(
        f"pytest plugin: each further test {over_s * 1e3:.0f} ms beyond its body"
        f" ({deciles[0] * 1e3:.0f} to {deciles[-1] * 1e3:.0f} ms from the first to the last tenth),"
        f" {over_s / start_s:.1f} x `python -c pass` ({start_s * 1e3:.0f} ms);"
        f" {(many_cpu_s - few_cpu_s) / (MANY - FEW) * 1e3:.0f} ms of CPU time in all processes;"
        f" load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    return int(over_s > max(BOUND_S, STARTS * start_s))


if __name__ == "__main__":
    sys.exit(main())
