"""What watching a run costs the node: CPU time of the monitor, with simulated ranks that write as real ones do.

``python -m tests.benchmarks.monitor_cost`` watches 8 and 64 ranks at 10 steps per second, each with rings that are
full, through the source of snapshots that every face has, asked four times a second as a screen asks. It prints the
CPU time per second of the run and the memory, and exits with 1 when the monitor takes more than 2 % of a core for 8
ranks or 10 % for 64.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

from ddpdoctor.profile.watch import live_source
from tests.scratch import scratch_directory

STEPS_PER_S = 10.0
WATCHED_S = 20.0
ASKED_EVERY_S = 0.25
ALLOWED = {8: 0.02, 64: 0.10}
RANKS = (8, 64)


def watch(directory: str, ranks: int) -> tuple[float, float, float]:
    """Watch the run in a process of its own; share of a core, seconds of CPU to catch up, and peak memory in MB."""
    source = live_source(Path(directory))
    try:
        began_cpu_s = time.process_time()
        snapshot = source.snapshot()
        caught_up_s = time.process_time() - began_cpu_s
        if len(snapshot.ranks) != ranks or snapshot.step_times is None:
            raise SystemExit(f"the monitor sees {len(snapshot.ranks)} of {ranks} ranks: {snapshot.notes}")
        first_cpu_s, started_s = time.process_time(), time.monotonic()
        while time.monotonic() - started_s < WATCHED_S:
            snapshot = source.snapshot()
            time.sleep(ASKED_EVERY_S)
        share = (time.process_time() - first_cpu_s) / (time.monotonic() - started_s)
    finally:
        source.close()
    if snapshot.state != "running" or time.time_ns() - (snapshot.measured_at_ns or 0) > 5e9:
        raise SystemExit(f"the monitor fell behind: {snapshot.state}, {snapshot.notes}")
    return share, caught_up_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(ranks: int) -> tuple[float, float, float]:
    """Start so many simulated ranks and watch them."""
    with scratch_directory() as directory:
        (directory / "job.json").write_text('{"version": 1, "kind": "run"}')
        command = (
            sys.executable,
            "-m",
            "tests.benchmarks.simulated_ranks",
            str(directory),
            str(ranks),
            str(STEPS_PER_S),
        )
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdin is not None
            try:
                writer.stdout.readline()
                words = (sys.executable, "-m", "tests.benchmarks.monitor_cost", "watch", str(directory), str(ranks))
                done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
            finally:
                writer.stdin.close()
    share, caught_up_s, memory_mb = map(float, done.stdout.split())
    return share, caught_up_s, memory_mb


def main() -> int:
    """Print what was measured; 1 when a bound is exceeded."""
    print(f"the monitor, with ranks at {STEPS_PER_S:g} steps per second")
    too_dear = False
    for ranks in RANKS:
        share, caught_up_s, memory_mb = measure(ranks)
        bound = ALLOWED.get(ranks)
        too_dear |= bound is not None and share > bound
        allowed = "" if bound is None else f"  (at most {bound:.0%})"
        print(
            f"  {ranks:4} ranks  {share:6.1%} of a core{allowed:15}"
            f"  {caught_up_s:5.1f} s of CPU to catch up, {memory_mb:,.0f} MB"
        )
    return int(too_dear)


if __name__ == "__main__":
    if sys.argv[1:2] == ["watch"]:
        print(*watch(sys.argv[2], int(sys.argv[3])))
    else:
        sys.exit(main())
