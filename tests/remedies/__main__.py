"""Prints every remedy with the examples that it is applied to, and what is wrong with them afterwards."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.remedies.judge import judged, mended_cases, not_shown, printed_remedies

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        rows = [judged(*row, directory / str(number)) for number, row in enumerate(mended_cases())]
        missing = not_shown(printed_remedies(directory / "printed"))
    for row in rows:
        sys.stdout.write(f"{'wrong' if row.wrong else 'right'}  {row.place}: {' '.join(row.mend.said)}\n")
        sys.stdout.writelines(f"       {complaint}\n" for complaint in row.wrong)
    sys.stdout.writelines(f"not applied: {one.check}:{one.line}: {one.remedy}\n" for one in missing)
    right = sum(not row.wrong for row in rows)
    sys.stdout.write(f"{right} of {len(rows)} remedies mend their example; {len(missing)} are not applied to one\n")
    sys.exit(right < len(rows) or bool(missing))
