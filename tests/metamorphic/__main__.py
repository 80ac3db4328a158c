"""Prints how many findings change in other spellings: ``python -m tests.metamorphic [TRANSFORM] [CASE]``."""

from __future__ import annotations

import sys

from tests.metamorphic.table import rows
from tests.metamorphic.transforms import TRANSFORMS

wanted = [name for name in ("comments", *TRANSFORMS) if name == (sys.argv[1:2] or [name])[0]]
for row in rows(wanted, (sys.argv[2:3] or [""])[0]):
    changed = f"{row.changed:4} changed ({row.share:.1%})"
    print(f"{row.transform:12} {row.programs:4} programs {row.findings:5} findings {changed}")
    for change in row.changes:
        print(f"    {change.case}: lost {sorted(change.lost)} made {sorted(change.made)}")
