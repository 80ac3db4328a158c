"""With ``-m full`` the tables of ``python -m tests.what_if`` and ``tests.what_if.recommended``, on real ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.timeout(3_000)
@pytest.mark.parametrize("table", ["tests.what_if", "tests.what_if.recommended"])
def test_the_table_keeps_its_bounds(table: str) -> None:
    told = subprocess.run(
        [sys.executable, "-m", table], cwd=ROOT, capture_output=True, text=True, check=False, timeout=2_900
    )
    assert told.returncode == 0, told.stdout[-6_000:] + told.stderr[-2_000:]
