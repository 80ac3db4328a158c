"""Prints what becomes of a user's files and machine, way by way, in both modes: ``python -m tests.no_harm``.

Every way to write, replace, delete and leave behind is done in a rehearsal of a real training on two ranks, and what
was there before is compared with what is there after: content, mode, owner, time, links and attributes of every file,
and processes. ``held`` is as it was; ``said`` was not held back, and the report names the program; all else is lost.
``--only WORDS`` takes the rows whose name has them, ``--mode`` one mode; ``--kills N`` kills the doctor so often.
``--escapes`` tries instead the ways out of the box to programs and devices outside, as root and as a user without
powers, and before that without the doctor, where each must reach something to be of any worth.
``--faults`` compares instead what the faults table finds in the two modes. It exits with 1 when anything was lost.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import sys
import time
import typing
from collections import Counter
from collections.abc import Iterator, Sequence

from tests.no_harm.escapes.judge import Powers, escapes
from tests.no_harm.rehearsal import Mode, Row, judged, modes
from tests.no_harm.same_findings import same_findings
from tests.no_harm.scenarios import SCENARIOS, killed, played
from tests.no_harm.ways import WAYS

TOGETHER = 24
"""Rows that share a rehearsal; the rest of those that a refusal has kept from being reached has the next one."""
NAMED_TOGETHER = 3
"""Programs that share a rehearsal without an overlay: the report's first line names so many."""

KILLS = 50


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 when something was lost."""
    parser = argparse.ArgumentParser(description="What a rehearsal leaves of a user's files.")
    parser.add_argument("--only", default="")
    parser.add_argument("--mode", choices=modes())
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--escapes", action="store_true")
    chosen = parser.parse_args(arguments)
    totals: Counter[tuple[str, str]] = Counter()
    began = time.monotonic()
    tables = [rows(mode, chosen.only, chosen.kills) for mode in ([chosen.mode] if chosen.mode else modes())]
    if chosen.faults:
        tables = [same_findings(chosen.only)]
    if chosen.escapes:
        tables = [every_escape(mode, chosen.only) for mode in ([chosen.mode] if chosen.mode else modes())]
    for row in itertools.chain.from_iterable(tables):
        lost = f": {row.why}" if row.verdict == "lost" else ""
        line = f"{row.label[:70]:70} {row.mode:10} {row.verdict}{lost}"
        print(line.encode("utf-8", "backslashreplace").decode(), flush=True)
        totals[row.mode, row.verdict] += 1
    for mode in dict.fromkeys(mode for mode, _ in totals):
        number = sum(count for (of, _), count in totals.items() if of == mode)
        told = ", ".join(f"{verdict} {totals[mode, verdict]}" for verdict in ("held", "said", "lost"))
        print(f"{mode}: {told} of {number}")
    print(f"{time.monotonic() - began:.0f} s")
    return int(any(count for (_, verdict), count in totals.items() if verdict == "lost"))


def rows(mode: Mode, only: str = "", kills: int = KILLS) -> Iterator[Row]:
    """Every row of a mode, then every scenario."""
    ways = [way for way in WAYS if way.is_here and only in way.label]
    if mode == "overlay":
        yield from judged(ways, mode, TOGETHER)
    else:
        yield from judged([way for way in ways if way.by == "Python"], mode, TOGETHER)
        yield from judged([way for way in ways if way.by != "Python"], mode, NAMED_TOGETHER)
    for name, play in SCENARIOS.items():
        if only in name:
            yield played(name, play, mode)
    if kills and only in (name := f"the doctor killed at {kills} random moments"):
        yield played(name, functools.partial(killed, times=kills), mode)


def every_escape(mode: Mode, only: str = "") -> Iterator[Row]:
    """Every way out that reaches something without the doctor, in a mode."""
    for powers in typing.get_args(Powers):
        if powers == "root" and os.geteuid() != 0:
            continue
        reach = {row.label for row in escapes("bare", powers, only) if row.verdict == "said"}
        yield from (row for row in escapes(mode, powers, only) if row.label in reach)


if __name__ == "__main__":
    sys.exit(main())
