"""Runs other libraries' distributed tests with and without the doctor: ``python -m tests.peers [MIRROR]``.

MIRROR holds snapshots of repositories, one ``OWNER+NAME/repo`` git directory each; suites that need one which is not
there, and those of packages that are not installed, are named as not run. Each suite is run plain and watched by
``profile``, and what became of each test is compared; of the examples the weights, gradients, optimizers and random
generators at the end, to the bit, three times. ``--only WORDS`` takes the suites whose name has them, ``--test NAME`` a
test of a suite of PyTorch's, ``--out FILE`` writes all outcomes. It exits with 1 when anything differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from tests.peers.rows import SUITES
from tests.peers.suites import Compared, Suite, compare, in_two_lanes
from tests.scratch import scratch_directory


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 when a test has another outcome under the doctor."""
    parser = argparse.ArgumentParser(prog="python -m tests.peers")
    parser.add_argument("mirror", type=Path, nargs="?")
    parser.add_argument("--only", default="")
    parser.add_argument("--test", action="append", default=[])
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    suites = [suite for suite in SUITES if chosen.only in suite.name and (suite.takes_names or not chosen.test)]
    began = time.monotonic()
    with scratch_directory() as scratch:
        mirror = chosen.mirror.absolute() if chosen.mirror else None
        compared = in_two_lanes(partial(told, scratch=scratch, mirror=mirror, names=chosen.test), suites)
    if chosen.out:
        chosen.out.write_bytes(msgspec.json.format(msgspec.json.encode(compared)))
    tests = sum(len(one.plain) for one in compared)
    differing = sum(len(one.differing) for one in compared)
    print(f"{tests} outcomes, {differing} differ, {sum(bool(one.lacks) for one in compared)} suites not run")
    print(f"{time.monotonic() - began:.0f} s")
    return int(differing > 0)


def told(suite: Suite, scratch: Path, mirror: Path | None, names: Sequence[str]) -> Compared:
    """Compare a suite and print its rows."""
    began = time.monotonic()
    compared = compare(suite, scratch, mirror, names)
    lines = [f"{suite.name:60} {_summary(compared)}"]
    for test in compared.differing:
        lines.append(f"  DIFFERS {test}: plain {compared.plain.get(test)}, watched {compared.watched.get(test)}")
    lines += [f"  unsteady {test}: at first {first}, alike when run again" for test, first in compared.unsteady.items()]
    took = "" if compared.lacks else f", {time.monotonic() - began:.0f} s"
    print("\n".join([lines[0] + took, *lines[1:]]), flush=True)
    return compared


def _summary(compared: Compared) -> str:
    if compared.lacks:
        return f"not run: {compared.lacks}"
    kinds: Counter[str] = Counter()
    for test, outcome in compared.plain.items():
        if test in compared.differing:
            continue
        parts = {part.split(":")[0].split()[-1] for part in outcome.split(", ")}
        fails = bool(parts & {"failed", "left"}) or (test == "(exit code)" and outcome != "0")
        kinds["fail in both" if fails else "skipped in both" if parts == {"skipped"} else "alike"] += 1
    kinds["differ"] = len(compared.differing)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


if __name__ == "__main__":
    sys.exit(main())
