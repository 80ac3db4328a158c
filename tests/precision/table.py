"""The table of ``PRECISION.md``: ``python -m tests.precision.table`` prints it from ``targets.toml``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def table(findings: Sequence[Mapping[str, Any]]) -> str:
    """One row a check that said anything: how many findings, how many of them true."""
    rows = ["| check | findings | true | false |", "| --- | ---: | ---: | ---: |"]
    for code in sorted({str(finding["code"]) for finding in findings}):
        labels = [bool(finding["true"]) for finding in findings if finding["code"] == code]
        rows.append(f"| {code} | {len(labels)} | {sum(labels)} | {len(labels) - sum(labels)} |")
    true = sum(bool(finding["true"]) for finding in findings)
    rows.append(f"| all | {len(findings)} | {true} | {len(findings) - true} |")
    return "\n".join(rows)


if __name__ == "__main__":
    if sys.version_info >= (3, 11):
        import tomllib

        print(table(tomllib.loads((Path(__file__).parent / "targets.toml").read_text(encoding="utf-8"))["finding"]))
