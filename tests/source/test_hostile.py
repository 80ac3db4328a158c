"""Sources that grow, nest and go on without end are read in seconds and little memory, or a bound is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.source.hostile import KINDS, main, read


# The CPU time of a process that shares its core with another is up to 1.7 times what it is alone.
@pytest.mark.alone
@pytest.mark.parametrize("number", range(len(KINDS)), ids=lambda number: KINDS[number].__name__.strip("_"))
def test_a_source_of_each_kind_is_read_in_bounds(number: int, tmp_path: Path) -> None:
    # Other work on the machine only adds, so the best of three counts: the same source took from 3.5 to 5.8 s here.
    said = [read(number, tmp_path)]
    while said[-1] and len(said) < 3:
        said.append(read(number, tmp_path))
    assert said[-1] == "", said


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_500_random_sources_are_read_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["hostile"])
    assert main() == 0
