"""Rehearses every idiom and every defect, and prints the table; names as arguments choose among them.

Exit code 1 when one of them is not as it has to be.
"""

from __future__ import annotations

import sys

from tests.idioms.cases import IDIOMS
from tests.idioms.defects import DEFECTS
from tests.script_table.model import Edit, Script
from tests.script_table.table import print_table


def main(names: list[str]) -> int:
    """Print one line a script."""
    idioms = {idiom.name: idiom for idiom in IDIOMS}
    rows: list[tuple[Script, Edit | None]] = [(idiom, None) for idiom in IDIOMS]
    rows += [(idioms[defect.idiom], defect) for defect in DEFECTS]
    return print_table(rows, names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
