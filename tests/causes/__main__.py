"""Prints which broken scripts of the other tables the whole check describes worse than the source alone."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.causes.table import complaints, scripts

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the scripts, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("words", nargs="*", help="words that the name of a script has to hold")
    options = parser.parse_args()
    drawn = random.Random(options.seed)
    chosen = [one for one in scripts() if drawn.random() < options.share and all(w in one.name for w in options.words)]
    worse = 0
    for script in chosen:
        with tempfile.TemporaryDirectory() as directory:
            said = complaints(script, Path(directory))
        worse += bool(said)
        sys.stdout.write(f"{'worse' if said else 'right'}  {script.name}\n")
        sys.stdout.writelines(f"       {complaint}\n" for complaint in said)
        sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - worse} of {len(chosen)} are told no worse than by the source alone\n")
    sys.exit(worse > 0)
