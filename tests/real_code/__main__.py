"""Measures the static reading on public scripts: ``python -m tests.real_code MIRROR [--keep DIRECTORY]``.

MIRROR holds snapshots of the repositories, one ``OWNER+NAME/repo`` git directory each. Prints the table of precision,
recall and clean scripts, then each finding that is wrong or that nobody has judged, and each defect that is missed.
Exits with 1 when a figure misses its bound. Nothing of the repositories is run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.real_code.corpus import read_labels
from tests.real_code.judge import Figures, Reading, clean, missed, precision, read_all, recall
from tests.scratch import scratch_directory

LOUD = ("error", "warning")
CONFIRMED = ("certain", "likely")


def main() -> int:
    """Print the table and what is behind it; return the exit code."""
    options = argparse.ArgumentParser(prog="python -m tests.real_code")
    options.add_argument("mirror", type=Path)
    options.add_argument("--keep", type=Path, help="Keep the laid out repositories here for the next time.")
    options.add_argument("--only", default="", help="Only scripts whose name contains this.")
    options.add_argument("--jobs", type=int, default=2)
    chosen = options.parse_args()
    scripts = [script for script in read_labels() if chosen.only in script.name]
    with scratch_directory() as scratch:
        readings = read_all(scripts, chosen.mirror, (chosen.keep or scratch).absolute(), chosen.jobs)
    table = figures(readings)
    for name, (share, bound) in table.items():
        print(f"{name:42} {share!s:24} bound {bound:g} %{'' if share.at_least(bound) else '  MISSED'}")
    print_details(readings)
    return 0 if all(share.at_least(bound) for share, bound in table.values()) else 1


def figures(readings: Sequence[Reading]) -> dict[str, tuple[Figures, float]]:
    """The rows of the table: what was measured, and the least that is asked for, in percent."""
    read = [one for one in readings if not one.failure]
    return {
        "scripts read": (Figures(len(read), len(readings)), 0),
        "errors and warnings right": (precision(readings, LOUD), 95),
        "errors right": (precision(readings, ("error",)), 97),
        "certain defects found": (recall(readings, ("certain",)), 85),
        "certain and likely defects found": (recall(readings, CONFIRMED), 75),
        "debatable defects found": (recall(readings, ("debatable",)), 0),
        "clean scripts without a loud finding": (clean(readings), 98),
        "no bound hit": (Figures(sum(not one.bound for one in read), len(read)), 100),
        "recognised as distributed": (Figures(sum(one.recognised for one in read), len(read)), 98),
        "conclusive: every check could look": (Figures(sum(not one.blind for one in read), len(read)), 0),
        "checks that could look": (
            Figures(sum(one.looked for one in read), sum(one.looked + one.blind for one in read)),
            90,
        ),
    }


def print_details(readings: Sequence[Reading]) -> None:
    """What is wrong, not judged, missed or not read, a line each."""
    for reading in readings:
        if reading.failure:
            print(f"not read: {reading.script.name}: {reading.failure}")
        if reading.bound:
            print(f"inconclusive: {reading.script.name}: {reading.bound}")
    for reading in readings:
        for said in reading.said:
            judged = reading.judgement(said)
            if said.loud and judged != "right":
                place = f"{said.path}:{said.line}" if said.path != reading.script.path else f":{said.line}"
                print(f"{judged} {said.severity}: {reading.script.name} {place} {said.code} {said.title}")
    for reading, defect in missed(readings):
        lines = ",".join(map(str, defect.lines))
        print(f"missed ({defect.confidence}): {reading.script.name}:{lines} {'/'.join(defect.codes)} {defect.title}")


if __name__ == "__main__":
    sys.exit(main())
