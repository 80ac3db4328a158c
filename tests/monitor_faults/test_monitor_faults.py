"""A few rows of the table of ``python -m tests.monitor_faults``, and all of it with ``-m full``."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.monitor_faults.__main__ import table
from tests.monitor_faults.play import Row, is_possible
from tests.monitor_faults.rows import ROWS

_SAMPLE = (
    "SIGSTOP and SIGCONT of a rank",
    "kill -9 of a rank",
    "no home",
    "a run directory that is deleted",
    "a state directory of 1 MB, with the screen",
    "a job that may write no file and dies of one",
)


def _wrong(rows: Sequence[Row], runs: int) -> dict[str, list[list[str]]]:
    found = {row.name: list(faults.values()) for row, _, faults in table(rows, runs, seed=0)}
    return {name: faults for name, faults in found.items() if faults}


@pytest.mark.timeout(300)
def test_a_sample_of_faults_leaves_the_training_as_it_was() -> None:
    rows = [row for row in ROWS if row.name in _SAMPLE and is_possible(row)]
    assert _wrong(rows, runs=1) == {}
    assert len(rows) > 2


def test_there_are_more_than_40_rows() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) > 40
    assert {row.name for row in ROWS}.issuperset(_SAMPLE)


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_no_fault_reaches_the_training() -> None:
    assert _wrong([row for row in ROWS if is_possible(row)], runs=5) == {}
