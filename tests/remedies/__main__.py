"""Prints every remedy with the examples that it is applied to, and what is wrong with them afterwards."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.checks.case_blocks import cases_of
from tests.remedies.judge import RUNS, Row, judged, mended_cases, not_shown, printed_remedies, rehearsed


def _rows(directory: Path, on_ranks: bool) -> Iterator[Row]:
    for number, row in enumerate(mended_cases()):
        yield judged(*row, directory / str(number))
    for case in cases_of(RUNS) if on_ranks else ():
        for number, mend in enumerate(case.mends):
            yield rehearsed(case, mend, directory / f"run-{case.line}-{number}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", action="store_true", help="also those of whole checks, on real ranks")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        right = total = 0
        for row in _rows(Path(name), options.runs):
            total, right = total + 1, right + (not row.wrong)
            sys.stdout.write(f"{'wrong' if row.wrong else 'right'}  {row.place}: {' '.join(row.mend.said)}\n")
            sys.stdout.writelines(f"       {complaint}\n" for complaint in row.wrong)
            sys.stdout.flush()
        missing = not_shown(printed_remedies(Path(name) / "printed"))
    sys.stdout.writelines(f"not applied: {one.check}:{one.line}: {one.remedy}\n" for one in missing)
    sys.stdout.write(f"{right} of {total} remedies mend their example; {len(missing)} are not applied to one\n")
    sys.exit(right < total or bool(missing))
