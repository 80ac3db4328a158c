"""Runs the examples of ``examples/clusters`` by their launchers, and prints what ddpdoctor told of each.

python -m tests.clusters [NAME ...]

A launcher that is not on the PATH is skipped with the reason; exits with 1 where the slow rank was not named.
"""

from __future__ import annotations

import sys

from tests.clusters.launchers import LAUNCHERS, run
from tests.jobs_of_tests import kill_marked
from tests.scratch import scratch_directory


def main() -> int:
    wanted = sys.argv[1:] or [launcher.name for launcher in LAUNCHERS]
    wrong = 0
    for launcher in LAUNCHERS:
        if launcher.name in wanted:
            with scratch_directory() as directory:
                told = run(launcher, directory)
                kill_marked(directory)
            state = "skipped" if told.skipped else "right" if told.right else "WRONG"
            wrong += state == "WRONG"
            print(f"{told.launcher:<12}{state:<9}{told.skipped or f'{told.ended}: {told.verdict}'}", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
