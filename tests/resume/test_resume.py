"""Some rows of the table of restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.resume.cases import CASES
from tests.resume.judge import complaints, proved

ROWS = [
    "the optimizer is not loaded",
    "buffers: parameters alone are saved",
    "gradient: a memory that is no part of the state",
    "random: every rank goes on with those of rank 0",
    "as it should be",
    "no checkpoint",
]


@pytest.mark.parametrize("name", ROWS)
def test_a_restart_is_judged_right(name: str, tmp_path: Path) -> None:
    assert complaints(CASES[name], proved(CASES[name], tmp_path)) == []
