"""Prints how often the tool was right at first sight: ``python -m tests.first_seen``; of one draw with ``--draw N``."""

from __future__ import annotations

import argparse

from tests.first_seen.ledger import NEWEST, rows, table

options = argparse.ArgumentParser(prog="python -m tests.first_seen")
options.add_argument("--draw", type=int, help="Only the rows of this draw.")
chosen = options.parse_args()
for kind in ("source", "rehearsal", "live", "autopsy", "equivalence", "resume"):
    own = [row for row in rows() if row.kind == kind and chosen.draw in (None, row.draw)]
    if not own:
        continue
    print(f"{kind}: {len(own)} cases, the newest of {own[-1].date}")
    newest = table(own[-NEWEST:])
    for name, (part, whole) in table(own).items():
        late, of = newest[name]
        print(
            f"  {name:34} {part:4} of {whole:4} {_share if (_share := f'({part / max(whole, 1):.1%})') else ''}"
            f"   last {NEWEST}: {late} of {of} ({late / max(of, 1):.1%})"
        )
