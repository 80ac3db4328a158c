"""Prints what is said of each fault and of each twin."""

from __future__ import annotations

import argparse
import sys

from ddpdoctor.diagnosis.training.equivalence_words import sentence
from tests.equivalence.judge import TABLE, compared, complaint

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="words that the name of a case has to hold")
    parser.add_argument("--launched", action="store_true", help="start the ranks as the command does; takes longer")
    options = parser.parse_args()
    wrong = total = unclear = 0
    for case in TABLE:
        if not all(word in case.name for word in options.words):
            continue
        section = compared(case, forked=not options.launched)
        said = complaint(case, section)
        total, wrong, unclear = total + 1, wrong + bool(said), unclear + (section.status == "inconclusive")
        sys.stdout.write(f"{'WRONG' if said else 'right'}  {case.name}\n       {said or sentence(section)}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{total - wrong} of {total} are right, {unclear} of all inconclusive\n")
    sys.exit(wrong > 0)
