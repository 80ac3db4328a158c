"""Prints the table of what the doctor measures beside what is true; exits with 1 when a figure is too far off.

python -m tests.truth [STEPS] [PYTHON], where PYTHON is the interpreter of the ranks, for the table of another torch.
"""

from __future__ import annotations

import sys

from tests.scratch import scratch_directory
from tests.truth.measure import PHASES, chapters_of, rows_of

SPECS = (
    "even",
    *(f"late:{phase}:{delay_ms}" for phase in PHASES for delay_ms in (20, 50, 100)),
    "barrier:100",
    "link:0",
    "link:20",
    "loader:30",
    "wide",
    "heavy",
    "accumulate:4",
)


def main() -> int:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    python = sys.argv[2] if len(sys.argv) > 2 else sys.executable
    with scratch_directory() as directory:
        rows = list(rows_of(chapters_of(directory, steps, SPECS, python)))
    for row in rows:
        print(f"{'ok ' if row.holds else 'OFF'}  {row.name:<64} {_shown(row.true):>12} {_shown(row.measured):>12}")
    off = sum(not row.holds for row in rows)
    print(f"{len(rows)} figures, {off} too far from the truth")
    return 1 if off else 0


def _shown(value: float | str) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
