"""Enters posted logs into the ledger as first seen: ``python -m tests.first_seen.enter_excerpts FILE DRAW``.

FILE is one of ``tests/autopsy/posted/*.txt``, with the right answers written before the tool saw a log. A log is right
where the first cause has one of the codes, the ranks and the words, and nothing says what would be wrong.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from tests.autopsy.excerpts import blocks_of, faults_of, found_in
from tests.first_seen.ledger import Came, Expected, Judgement, Row, append, is_right


def main() -> int:
    """Judge the logs and enter them; print those that are not right."""
    path, draw = Path(sys.argv[1]), int(sys.argv[2])
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for excerpt in blocks_of(path.read_text(encoding="utf-8")):
            faults = faults_of(excerpt, Path(directory))
            came = []
            for index, one in enumerate(found_in(excerpt, Path(directory))):
                wrong = one["severity"] == "error" and one["code"] not in excerpt.code
                right = index == 0 and not wrong and not faults
                why = "; ".join(faults) if index == 0 else "what followed, or was survived, was not read"
                judged: Judgement = "wrong" if wrong else "right" if right else "debatable"
                came.append(Came(one["code"], one["severity"], "", 0, judged, "" if right else why))
            expected = (Expected(excerpt.code, found=not faults),) if excerpt.code else ()
            if faults:
                print(excerpt.name, faults, came)
            rows.append(
                Row(
                    date=date.today().isoformat(),
                    kind="autopsy",
                    case=f"tests/autopsy/posted/{path.name}:{excerpt.name}",
                    commit=commit.strip(),
                    expected=expected,
                    came=tuple(came),
                    right=is_right(expected, came),
                    draw=draw,
                )
            )
    append(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
