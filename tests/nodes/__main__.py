"""The truth table of two nodes: ``python -m tests.nodes [--runs 10] [--ahead 5] [--keep DIR] [CASE…]``; needs root.

Each case runs on two network namespaces; the clock of the second one is 5 s ahead in every other run where there
is a C compiler. With ``--keep`` all that a wrong run wrote stays in a directory there.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tests.nodes.jobs import CASES, HAS_COMPILER, run, wrong
from tests.nodes.machines import why_not


def main() -> int:
    """Run the table; 1 where something was not as it has to be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--ahead", type=int, default=5, help="seconds, in every other run")
    parser.add_argument("--keep", type=Path, metavar="DIR")
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    options = parser.parse_args()
    if reason := why_not():
        print(f"not run: {reason}")
        return 3
    right = total = 0
    for name in options.cases:
        for number in range(options.runs):
            ahead_s = options.ahead if number % 2 and HAS_COMPILER else 0
            total += 1
            with tempfile.TemporaryDirectory(prefix="nodes-", ignore_cleanup_errors=True) as directory:
                try:
                    outcome = run(CASES[name], Path(directory), ahead_s=ahead_s)
                    faults, said = wrong(CASES[name], outcome), outcome.head["verdict"]["text"]
                except Exception as error:
                    faults, said = [f"{type(error).__name__}: {error}"], ""
                if faults and options.keep is not None:
                    shutil.copytree(directory, options.keep / Path(directory).name, symlinks=True)
            right += not faults
            clock = f", clock {ahead_s} s ahead" if ahead_s else ""
            print(f"{'ok   ' if not faults else 'WRONG'} {name}{clock}: {said}", flush=True)
            for fault in faults:
                print(f"      {fault}", flush=True)
    print(f"{right} of {total} right")
    return int(right < total)


if __name__ == "__main__":
    sys.exit(main())
