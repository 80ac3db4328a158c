"""Rehearses every CUDA script and every broken variant, and prints the table; names as arguments choose among them.

Exit code 1 when one of them is not as it has to be.
"""

from __future__ import annotations

import sys

from tests.script_table.model import Edit, Script
from tests.script_table.table import print_table
from tests.stand_in.table import BROKEN, CUDA_SCRIPTS


def main(names: list[str]) -> int:
    """Print one line a script."""
    scripts = {script.name: script for script in CUDA_SCRIPTS}
    rows: list[tuple[Script, Edit | None]] = [(script, None) for script in CUDA_SCRIPTS]
    rows += [(scripts[broken.script], broken) for broken in BROKEN]
    return print_table(rows, names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
