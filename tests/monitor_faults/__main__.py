"""Prints what befalls a watched training when something goes wrong beside it: ``python -m tests.monitor_faults``.

A row is a fault: a signal, a full disk, a tight limit, a strange job. Each is played several times at random moments,
and compared with the same training without the doctor: digest of weights and optimizer, exit code, output, files and
processes that are left, and how long the user waits for the answer. ``--only WORDS`` takes the rows whose name has
them. It exits with 1 when a row was wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tests.monitor_faults.judge import played
from tests.monitor_faults.play import Outcome, Row, is_possible, play
from tests.monitor_faults.rows import ROWS
from tests.scratch import scratch_directory

TOGETHER = 2
"""Jobs that run at once."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 when a row was wrong."""
    parser = argparse.ArgumentParser(description="What befalls a watched training when something goes wrong.")
    parser.add_argument("--only", default="")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    began_s, failed = time.monotonic(), 0
    named = [row for row in ROWS if chosen.only in row.name]
    rows = [row for row in named if is_possible(row)]
    for row in named:
        if row not in rows:
            print(f"{row.name[:80]:80} not done: this user or machine cannot")
    for row, runs, faults in table(rows, chosen.runs, chosen.seed):
        failed += bool(faults)
        print(f"{row.name[:80]:80} {runs - len(faults)} of {runs}", flush=True)
        for number, wrong in faults.items():
            print(*(f"    run {number}: {text}" for text in wrong), sep="\n", flush=True)
    print(f"{len(rows) - failed} of {len(rows)} rows are right, {time.monotonic() - began_s:.0f} s")
    return int(failed > 0)


def table(rows: Sequence[Row], runs: int, seed: int) -> Iterator[tuple[Row, int, dict[int, list[str]]]]:
    """Play rows; each with how often it was played, and what was wrong in which run."""
    with scratch_directory() as scratch, ThreadPoolExecutor(TOGETHER) as pool:
        scratch.chmod(0o755)  # Some rows belong to another user.
        undisturbed = pool.submit(play, Row(name="undisturbed"), _fresh(scratch), "0", watched=False)

        def bare(row: Row) -> Outcome:
            return play(row, _fresh(scratch), f"{seed} {row.name}", watched=False)

        def watched(row: Row, number: int, plain: Future[Outcome]) -> list[str]:
            try:
                # The pool is a queue: the plain run has begun before those that wait for it.
                return played(row, _fresh(scratch), f"{seed} {row.name} {number}", plain.result())
            except (OSError, ValueError) as error:  # A row that cannot be played must not take the others along.
                return [f"not played: {error!r}"]

        begun = []
        for row in rows:
            plain = pool.submit(bare, row) if row.bare == "likewise" else undisturbed
            times = row.runs if row.runs and runs > 1 else runs
            begun.append((row, [pool.submit(watched, row, number, plain) for number in range(times)]))
        for row, awaited in begun:
            results = [future.result() for future in awaited]
            yield row, len(results), {number: found for number, found in enumerate(results) if found}


def _fresh(scratch: Path) -> Path:
    """Return a directory of its own; its path is short, for sockets lie below it."""
    return Path(tempfile.mkdtemp(dir=scratch))


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    sys.exit(main())
