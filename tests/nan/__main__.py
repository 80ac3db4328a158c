"""The table of values that are not finite: ``python -m tests.nan [--only WORDS] [--healthy]``."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.nan.cases import healthy, injections
from tests.nan.judge import complaints, watched


def main() -> int:
    """Run the injections, or the healthy jobs, and print a line for each; 1 where one of them is judged wrongly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names that hold these words")
    parser.add_argument("--healthy", action="store_true", help="the healthy jobs instead of the injections")
    chosen = parser.parse_args()
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


if __name__ == "__main__":
    raise SystemExit(main())
