"""Prints the table of hangs and of jobs that go on, as they are told while they run; exits with 1 when a row is wrong.

python -m tests.live_hangs [--times N] [--after N] [--load] [--jobs N] [--part hangs|healthy] [--only WORDS]
    [--python PATH]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.live_hangs.cases import MOST_S
from tests.live_hangs.healthy import NEAR_HANGS
from tests.live_hangs.run import ENDINGS, Outcome, run_hang, run_healthy
from tests.live_hangs.table import HANGS
from tests.scratch import scratch_directory


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.live_hangs", description=__doc__)
    parser.add_argument("--times", type=int, default=1, help="how often each row is run, each time ended another way")
    parser.add_argument(
        "--after", type=int, default=0, help="how often each row was run before: the endings go on from there"
    )
    parser.add_argument("--load", action="store_true", help="keep every core busy meanwhile")
    parser.add_argument("--jobs", type=int, default=1, help="rows at once; they mostly stand")
    parser.add_argument("--only", nargs="*", default=(), help="rows whose names hold one of these words")
    parser.add_argument("--part", choices=("hangs", "healthy"), help="one half of the table")
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter of the ranks, for the table of another torch"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the rows, and end")
    wanted = parser.parse_args()
    hangs = [name for name in HANGS if wanted.part != "healthy" and _is_wanted(name, wanted.only)]
    healthy = [name for name in NEAR_HANGS if wanted.part != "hangs" and _is_wanted(name, wanted.only)]
    if wanted.list:
        print("\n".join([*hangs, *healthy]))
        return 0
    tasks = [(name, turn) for turn in range(wanted.after, wanted.after + wanted.times) for name in (*hangs, *healthy)]
    with scratch_directory() as directory, _load(wanted.load), ThreadPoolExecutor(wanted.jobs) as pool:
        outcomes = []
        for outcome in pool.map(lambda task: _run(directory, wanted.python, *task), tasks):
            outcomes.append(outcome)
            _print(outcome)
    _print_figures(outcomes)
    return 1 if any(outcome.wrong for outcome in outcomes) else 0


def _is_wanted(name: str, words: tuple[str, ...]) -> bool:
    return not words or any(word in name for word in words)


def _run(directory: Path, python: str, name: str, turn: int) -> Outcome:
    folder = directory / f"{(list(HANGS) + list(NEAR_HANGS)).index(name)}-{turn}"
    folder.mkdir()
    if name in HANGS:
        return run_hang(name, HANGS[name], folder, ENDINGS[(list(HANGS).index(name) + turn) % len(ENDINGS)], python)
    return run_healthy(name, NEAR_HANGS[name], folder, python)


def _print(outcome: Outcome) -> None:
    after = "" if outcome.told_after_s is None else f"{outcome.told_after_s:.1f} s"
    print(f"{'ok   ' if not outcome.wrong else 'WRONG'} {outcome.name:<58} {after:>7}  {outcome.final}", flush=True)
    for wrong in outcome.wrong:
        print(f"        {wrong}", flush=True)


def _print_figures(outcomes: list[Outcome]) -> None:
    hangs = [outcome for outcome in outcomes if outcome.name in HANGS]
    healthy = [outcome for outcome in outcomes if outcome.name in NEAR_HANGS]
    if hangs:
        right = sum(not outcome.wrong for outcome in hangs)
        print(f"hangs: {right} of {len(hangs)} right ({right / len(hangs):.1%})")
    for kind in MOST_S:
        times = [
            outcome.told_after_s
            for outcome in hangs
            if HANGS[outcome.name].kind == kind and outcome.told_after_s is not None
        ]
        if times:
            print(f"  {kind}: median {statistics.median(times):.1f} s, worst {max(times):.1f} s after the fault")
    if healthy:
        alarms = sum(bool(outcome.wrong) for outcome in healthy)
        print(f"jobs that go on: {alarms} of {len(healthy)} with a false alarm")


@contextmanager
def _load(wanted: bool) -> Iterator[None]:
    """Two busy processes a core, as ``stress-ng --cpu`` makes them."""
    processes = [multiprocessing.Process(target=_spin, daemon=True) for _ in range((os.cpu_count() or 1) * wanted)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def _spin() -> None:
    while True:
        sum(range(10_000))


if __name__ == "__main__":
    sys.exit(main())
