"""Rehearses every idiom and every defect, and prints the table; names as arguments choose among them.

Exit code 1 when one of them is not as it has to be.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.idioms.cases import IDIOMS, Idiom
from tests.idioms.defects import DEFECTS, Defect
from tests.idioms.rehearsal import complaints, missing, rehearse


def main(names: list[str]) -> int:
    """Print one line a script."""
    idioms = {idiom.name: idiom for idiom in IDIOMS}
    rows: list[tuple[Idiom, Defect | None]] = [(idiom, None) for idiom in IDIOMS]
    rows += [(idioms[defect.idiom], defect) for defect in DEFECTS]
    chosen = [(idiom, defect) for idiom, defect in rows if not names or (defect or idiom).name in names]
    print(f"{'script':<52}{'s':>6}{'steps':>7}{'ranks':>7}{'exit':>6}  findings", flush=True)
    wrong = 0
    for idiom, defect in chosen:
        name = f"{idiom.name}: {defect.name}" if defect else idiom.name
        if absent := missing(idiom):
            print(f"{name:<52}  not installed: {', '.join(absent)}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as project, tempfile.TemporaryDirectory() as state:
            outcome = rehearse(idiom, Path(project), Path(state), defect)
        said = complaints(idiom, outcome, defect)
        wrong += bool(said)
        rehearsal = outcome.report["rehearsal"]
        found = ", ".join(f"{code} {severity}" for code, severity in outcome.codes.items()) or "none"
        print(
            f"{name:<52}{outcome.seconds:>6.1f}{rehearsal['steps']:>7}{rehearsal['ranks']:>7}{outcome.exit_code:>6}"
            f"  {found}",
            *said,
            sep="\n    WRONG: ",
            flush=True,
        )
    print(f"{len(chosen) - wrong} of {len(chosen)} as they have to be", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
