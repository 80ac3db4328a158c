"""Rehearses scripts and their broken variants one after the other, and prints one line for each."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.script_table.model import Edit, Script
from tests.script_table.rehearsal import complaints, rehearse


def print_table(rows: Iterable[tuple[Script, Edit | None]], names: Sequence[str]) -> int:
    """Print the rows that ``names`` choose, all when there are none; 1 when one is not as it has to be, otherwise 0."""
    chosen = [(script, edit) for script, edit in rows if not names or (edit or script).name in names]
    print(f"{'script':<52}{'s':>6}{'steps':>7}{'ranks':>7}{'exit':>6}  findings", flush=True)
    wrong = 0
    for script, edit in chosen:
        name = f"{script.name}: {edit.name}" if edit else script.name
        with tempfile.TemporaryDirectory() as project, tempfile.TemporaryDirectory() as state:
            outcome = rehearse(script, Path(project), Path(state), edit)
        said = complaints(script, outcome, edit)
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
