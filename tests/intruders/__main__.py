"""Prints what strangers and liars do to a watched job, attack by attack: ``python -m tests.intruders``.

A real job of two ranks on two nodes of this machine trains, watched at both, and all attacks meet it one after the
other. Of each it prints how much more memory and how many more descriptors the head had, how long a scrape and the next
update of the honest node took, and the steps of the training meanwhile; at the end whether the job came out as without
a monitor. Agents and screens meet somebody in the place of their head. ``--only WORDS`` takes the rows whose name has
them. It exits with 1 where the head took more than 64 MB, a scrape 2 s or an update 5 s, or where the training stood or
came out differently.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ddpdoctor.errors import DdpDoctorError
from tests.intruders.job import MOST_MB, Ended, watched
from tests.intruders.liars import LIARS
from tests.intruders.rogue_heads import ROGUE_HEADS, met
from tests.intruders.scrapers import SCRAPERS
from tests.intruders.strangers import STRANGERS


class Row(NamedTuple):
    """One attack and what became of it."""

    name: str
    wrong: str
    figures: str


ATTACKS = {**STRANGERS, **LIARS, **SCRAPERS}


def rows(names: Sequence[str]) -> Iterator[Row]:
    """Each attack of these names, and how the job came out that they met."""
    ends: list[Ended] = []
    attacks = {name: attack for name, attack in ATTACKS.items() if name in names}
    with tempfile.TemporaryDirectory(prefix="intruders-", ignore_cleanup_errors=True) as made:
        if attacks:
            with watched(Path(made), ends) as job:
                for name, attack in attacks.items():
                    try:
                        found = job.attacked(attack)
                    except (AssertionError, DdpDoctorError) as error:
                        yield Row(name, f"what was expected did not come: {error}", "")
                        continue
                    figures = (
                        f"{found.grown_mb:5.1f} MB {found.descriptors:5} fds  scrape {found.scrape_s:5.2f} s  "
                        f"answered {found.answered_s:4.1f} s  {found.steps:4} steps"
                    )
                    yield Row(name, found.wrong, figures)
            yield Row("the job's end", ends[0].wrong, ends[0].weights[0])
    for name, meet in ROGUE_HEADS.items():
        if name in names:
            grown_mb, said = met(meet)
            yield Row(name, f"{grown_mb:.0f} MB more" if grown_mb > MOST_MB else "", f"{grown_mb:5.1f} MB  {said}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 where something was harmed."""
    parser = argparse.ArgumentParser(description="What strangers and liars do to a watched job.")
    parser.add_argument("--only", default="")
    only, wrong, count, began_s = parser.parse_args(arguments).only, 0, 0, time.monotonic()
    for row in rows([name for name in (*ATTACKS, *ROGUE_HEADS) if only in name]):
        print(f"{row.name[:52]:52} {row.figures}{'  WRONG: ' + row.wrong if row.wrong else ''}", flush=True)
        wrong, count = wrong + bool(row.wrong), count + 1
    print(f"{count} rows, {wrong} wrong, {time.monotonic() - began_s:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
