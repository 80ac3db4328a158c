"""How long a test on two ranks takes beyond its body, once the ranks are warm.

The bound is absolute, as a user feels it, on a machine that has a core for each rank; the time that Python itself takes
to start is printed beside it, as a measure of the machine and of its load.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.pytest_plugin.session import run_pytest
from tests.scratch import scratch_directory

BOUND_S = 0.2
TESTS = 40
BODY = f"""
import pytest

@pytest.mark.ddp
@pytest.mark.parametrize("turn", range({TESTS}))
def test_on_ranks(turn, ddp_rank):
    import torch.distributed as dist
    dist.barrier()

@pytest.mark.parametrize("turn", range({TESTS}))
def test_here(turn): pass
"""


def measure() -> tuple[float, list[float], list[float]]:
    """Seconds of the first test on ranks, of the further ones, and of tests without ranks."""
    with scratch_directory() as directory:
        (directory / "test_cost.py").write_text(BODY)
        session = run_pytest(directory)
    assert session.code == 0, session.output
    on_ranks = [session.seconds[f"test_on_ranks[{turn}]"] for turn in range(TESTS)]
    return on_ranks[0], on_ranks[1:], [session.seconds[f"test_here[{turn}]"] for turn in range(TESTS)]


def main() -> int:
    """Print the figures; 1 when the median of further tests exceeds its bound."""
    first, further, here = measure()
    pure = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True, cwd=Path(__file__).parent)
        pure.append(time.perf_counter() - began)
    over = statistics.median(further) - statistics.median(here)
    deciles = statistics.quantiles(further, n=10)
    print(f"pytest plugin: first test on 2 ranks {first:.1f} s (imports torch)")
    print(
        f"pytest plugin: each further test {over * 1e3:.0f} ms beyond its body"
        f" ({deciles[0] * 1e3:.0f} to {deciles[-1] * 1e3:.0f} ms from the first to the last tenth;"
        f" `python -c pass` {statistics.median(pure) * 1e3:.0f} ms; load {os.getloadavg()[0]:.1f}"
        f" on {os.cpu_count()} cores; bound {BOUND_S * 1e3:.0f} ms)"
    )
    return int(over > BOUND_S)


if __name__ == "__main__":
    sys.exit(main())
