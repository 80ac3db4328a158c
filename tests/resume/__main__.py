"""The table of restarts: ``python -m tests.resume [--only WORDS]``."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.resume.cases import CASES
from tests.resume.judge import complaints, proved


def main() -> int:
    """Check every case, and print a line for each; 1 where one of them is judged wrongly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names that hold these words")
    chosen = parser.parse_args()
    wrong = right = 0
    for name, case in CASES.items():
        if chosen.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            bad = complaints(case, proved(case, Path(folder)))
        wrong += bool(bad)
        right += not bad
        print(f"{'WRONG' if bad else 'right'}  {name}", *bad, sep="\n         ", flush=True)
    print(f"{right} of {right + wrong} right")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
