"""Some rows of the table of restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.resume.cases import CASES
from tests.resume.judge import complaints, proved


@pytest.mark.parametrize("name", ["the optimizer is not loaded", "as it should be", "no checkpoint"])
def test_a_restart_is_judged_right(name: str, tmp_path: Path) -> None:
    assert complaints(CASES[name], proved(CASES[name], tmp_path)) == []
