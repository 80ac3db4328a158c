"""Gives damaged and hostile files to the commands that read them: ``python -m tests.damaged [--seed N] [--number N]``.

Real runs, dumps of the flight recorder, logs, compressed logs, a baseline of the gate and reports are damaged at
random; each row needs one sentence and the right exit code within 10 s and 1 GB, reads and writes nothing outside of
what was named, and never calls clean what it could not read. ``--first N`` begins there, ``--only WORD`` takes the rows
whose name has it, ``--originals DIR`` keeps what is damaged for the next time. It exits with 1 when any row is wrong.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tests.bad_inputs.judge import slowness
from tests.check_command import ROOT
from tests.damaged.cases import Case, case
from tests.damaged.judge import problems, tree
from tests.damaged.originals import make
from tests.damaged.server import Ending, Server, Task
from tests.scratch import scratch_directory


class Row(msgspec.Struct, frozen=True):
    """One case and what came of it."""

    number: int
    case: Case
    ending: Ending
    problems: tuple[str, ...]


def main() -> int:
    """Print each wrong answer and a summary; 1 when there was one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=2_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--originals", type=Path)
    chosen = parser.parse_args()
    kinds: Counter[str] = Counter()
    wrong = number = 0
    slowest, largest = 0.0, 0
    began_s = time.monotonic()
    with scratch_directory() as scratch:
        originals = chosen.originals or scratch / "originals"
        if not (originals / "baseline.json").exists():
            originals.mkdir(parents=True, exist_ok=True)
            make(originals)
        for row in rows(
            range(chosen.first, chosen.first + chosen.number), chosen.seed, originals, scratch, chosen.only
        ):
            number += 1
            slowest, largest = max(slowest, row.ending.seconds), max(largest, row.ending.peak_bytes)
            if row.problems:
                wrong += 1
                kinds.update(problem.partition(" (")[0][:50] for problem in row.problems)
                print(f"{row.number:5} {row.case.name[:56]:56} {' '.join(row.case.arguments)[:40]!r}", end=" ")
                print(f"{row.ending.code}, {row.ending.seconds:.1f} s: {'; '.join(row.problems)}", flush=True)
    for problem, count in kinds.most_common():
        print(f"{count:6} {problem}")
    print(f"{wrong} of {number} rows wrong; slowest {slowest:.1f} s, largest {largest >> 20} MiB;", end=" ")
    print(f"{time.monotonic() - began_s:.0f} s")
    return int(bool(wrong))


def rows(numbers: range, seed: int, originals: Path, scratch: Path, only: str = "") -> Iterator[Row]:
    """Yield the rows, each made, answered and judged, and then taken away."""
    slow = slowness()
    with Server(originals / "run", ROOT) as server:
        for number in numbers:
            place = scratch / f"row-{number}"
            made = case(number, seed, originals, place)
            if only in made.name:
                before = tree(place)
                ending = server.run(Task(made.arguments, str(place / "work"), made.grows))
                yield Row(number, made, ending, tuple(problems(made, ending, place, before, slow)))
            _remove(place)


def _remove(place: Path) -> None:
    for path in (place / "work").iterdir():
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(place)


if __name__ == "__main__":
    sys.exit(main())
