"""With ``-m full`` the table of ``python -m tests.what_if``: predictions beside changed runs on real ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.timeout(3_000)
def test_the_table_keeps_its_bounds() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "tests.what_if"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=2_900
    )
    assert told.returncode == 0, told.stdout[-6_000:] + told.stderr[-2_000:]
