"""Some rows of the table of values that are not finite, and of the healthy jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nan.cases import healthy, injections
from tests.nan.judge import complaints, watched

KINDS = [f"{kind} 0 on rank {rank} in step 3" for rank, kind in enumerate(("forward", "backward", "data"))]


def test_what_one_rank_makes_is_told_of_it(tmp_path: Path) -> None:
    name = KINDS[0]
    case = injections()[name]
    assert complaints(case, watched(case.script, tmp_path)) == []


@pytest.mark.parametrize("name", [*KINDS[1:], "optimizer 0 on rank 0 in step 3"])
def test_every_kind_is_told_as_what_it_is(name: str, tmp_path: Path) -> None:
    case = injections()[name]
    assert complaints(case, watched(case.script, tmp_path)) == []


@pytest.mark.parametrize("name", ["scaler that skips again and again", "a NaN loss whose step all ranks skip"])
def test_steps_that_are_skipped_are_in_order(name: str, tmp_path: Path) -> None:
    assert complaints(None, watched(healthy()[name], tmp_path)) == []
