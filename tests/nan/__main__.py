"""The table of values that are not finite: ``python -m tests.nan [--only WORDS] [--healthy] [--flips]``."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.nan.cases import healthy, injections
from tests.nan.flips import RANKS, wrong_flips
from tests.nan.judge import complaints, watched


def main() -> int:
    """Run the injections, or the healthy jobs, and print a line for each; 1 where one of them is judged wrongly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names that hold these words")
    parser.add_argument("--healthy", action="store_true", help="the healthy jobs instead of the injections")
    parser.add_argument("--flips", action="store_true", help="bits that are flipped in a parameter instead")
    chosen = parser.parse_args()
    if chosen.flips:
        return _flips()
    known = injections()
    names = healthy() if chosen.healthy else {name: one.script for name, one in known.items()}
    wrong = right = 0
    for name, script in names.items():
        if chosen.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            said = watched(script, Path(folder))
        bad = complaints(known.get(name), said)
        wrong += bool(bad)
        right += not bad
        print(f"{'WRONG' if bad else 'right'}  {name}", *bad, sep="\n         ", flush=True)
    print(f"{right} of {right + wrong} right")
    return int(wrong > 0)


def _flips() -> int:
    wrong: dict[str, str] = {}
    for job in range(len(RANKS)):
        with tempfile.TemporaryDirectory() as folder:
            wrong |= wrong_flips(job, Path(folder))
    for label, bad in wrong.items():
        print("WRONG" if bad else "right", label, bad)
    print(f"{sum(not bad for bad in wrong.values())} of {len(wrong)} right")
    return int(any(wrong.values()))


if __name__ == "__main__":
    raise SystemExit(main())
