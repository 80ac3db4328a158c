"""The fault table: each injected fault on real ranks, what was said of it, and how soon.

``python -m tests.benchmarks.faults`` runs every fault five times, the last time under load, then every healthy variant
five times, and prints both tables; ``--runs N`` and ``--only WORDS`` (part of a name) make it shorter, and ``--python
PATH`` runs them on the torch of another interpreter. It exits with 1 when a fault was missed, misnamed or told too
late, or a healthy variant was not left alone.

Seconds count from the moment at which the fault strikes, which the script says itself, to the whole diagnosis, stacks
and clean-up included. Proofs: median below 2 s, worst 5 s. A rank that stands: the stall time and 2 s more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddpdoctor.examine.one_script import ExamineRequest
from tests.faults.cases import FAULTS
from tests.faults.healthy import HEALTHY, examine_healthy
from tests.faults.judge import run_fault
from tests.scratch import scratch_directory

MEDIAN_S = 2.0
WORST_S = 5.0
STUCK_S = ExamineRequest(target="").stall_after_s + 2.0


def main(arguments: list[str] | None = None) -> int:
    """Print both tables; 1 when a target was missed."""
    parser = argparse.ArgumentParser(description="Injected faults and healthy variants on real ranks.")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--python", help="interpreter of the ranks")
    chosen = parser.parse_args(arguments)
    with scratch_directory() as state:
        os.environ["XDG_STATE_HOME"] = str(state)
        missed = _fault_table(chosen.runs, chosen.only, chosen.python)
        return int(_healthy_table(chosen.runs, chosen.only, chosen.python) or missed)


def _fault_table(runs: int, only: str, python: str | None) -> bool:
    missed = False
    proofs: list[float] = []
    print(f"{'fault':40} {'ranks':>5} {'code':7} {'named':8} {'basis':8} {'median s':>8} {'worst s':>8}")
    for name, fault in FAULTS.items():
        if only not in name:
            continue
        seconds, wrong = [], []
        for run in range(runs):
            with in_directory() as folder, _load(run == runs - 1 and runs > 1):
                result = run_fault(fault, folder, python=python)
            wrong += [result.wrong] if result.wrong else []
            seconds += [] if result.verdict_s is None else [result.verdict_s]
        worst = max(seconds, default=0.0)
        late = worst > {"proof": WORST_S, "strong": STUCK_S, "bounded": fault.time_limit_s + 5.0}[fault.basis]
        if fault.basis == "proof":
            proofs += seconds
        named = "both" if fault.culprit is None else f"rank {fault.culprit}"
        median = f"{statistics.median(seconds):8.2f} {worst:8.2f}" if seconds else f"{'-':>8} {'-':>8}"
        print(
            f"{name:40} {fault.ranks:5} {fault.code or '-':7} {named:8} {fault.basis:8} {median}"
            f"{'  LATE' if late else ''}{f'  WRONG in {len(wrong)} of {runs}: {wrong[0]}' if wrong else ''}",
            flush=True,
        )
        missed |= late or bool(wrong)
    if proofs:
        median_s = statistics.median(proofs)
        worst_s = max(proofs)
        print(f"proofs: median {median_s:.2f} s (at most {MEDIAN_S:g}), worst {worst_s:.2f} s (at most {WORST_S:g})")
        missed |= median_s > MEDIAN_S
    return missed


def _healthy_table(runs: int, only: str, python: str | None) -> bool:
    missed = False
    for name, script in HEALTHY.items():
        if only not in name:
            continue
        wrong = []
        for run in range(runs):
            with in_directory() as folder, _load(run == runs - 1 and runs > 1):
                said = examine_healthy(script, folder, python=python)
            wrong += [said] if said else []
        told = f"WRONG in {len(wrong)} of {runs}: {wrong[0]}" if wrong else f"left alone in {runs} of {runs}"
        print(f"{name:40} {told}", flush=True)
        missed |= bool(wrong)
    return missed


@contextmanager
def in_directory() -> Iterator[Path]:
    """A new working directory, gone afterwards."""
    before = Path.cwd()
    with scratch_directory() as folder:
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)


@contextmanager
def _load(wanted: bool) -> Iterator[None]:
    """Keep every core busy with one more process."""
    command = [sys.executable, "-c", "while True: pass"]
    burners = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)] if wanted else []
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


if __name__ == "__main__":
    sys.exit(main())
