"""Start-up cost: ``--version`` and ``check --static`` against ``python -c pass``.

``python -m tests.benchmarks.start_up`` prints the medians of 20 cold processes each, interleaved, with bytecode warm,
and the ratios; it exits with 1 when a ratio is above 20.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

RUNS = 20
BOUND = 20.0
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "healthy.py"

COMMANDS: dict[str, tuple[str, ...]] = {
    "python -c pass": ("-c", "pass"),
    "ddpdoctor --version": ("-m", "ddpdoctor", "--version"),
    "ddpdoctor check --static": ("-m", "ddpdoctor", "check", "--static", str(SCRIPT)),
    "same, --output-format json": ("-m", "ddpdoctor", "check", "--static", "--output-format", "json", str(SCRIPT)),
}
"""Arguments of Python by what is measured; the first is what the others are compared with."""


def measure(runs: int = RUNS) -> dict[str, float]:
    """Return the median CPU time of each command in seconds."""
    for arguments in COMMANDS.values():
        run_once(arguments)
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(runs):
        for name, arguments in COMMANDS.items():
            times[name].append(run_once(arguments))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def run_once(arguments: tuple[str, ...]) -> float:
    """Run Python once, in a process of its own, and return the CPU seconds that it took: they bear a busy machine."""
    process = subprocess.Popen(
        (sys.executable, *arguments), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, arguments
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Print the table; 1 when a bound is exceeded."""
    medians = measure()
    base = medians["python -c pass"]
    print(f"start-up, median of {RUNS} cold processes, bound {BOUND:.0f} x")
    for name, seconds in medians.items():
        print(f"  {name:<26} {seconds * 1000:7.1f} ms  {seconds / base:5.1f} x")
    return int(any(seconds > BOUND * base for seconds in medians.values()))


if __name__ == "__main__":
    sys.exit(main())
