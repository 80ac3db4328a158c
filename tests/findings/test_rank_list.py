"""How ranks are named: a set with gaps is short, and says how many there are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ddpdoctor.finding import rank_list


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ((), "no rank"),
        ((3,), "rank 3"),
        ((2, 0), "ranks 0 and 2"),
        (range(256), "ranks 0-255"),
        ((0, 1, 2, 4, 6, 7), "ranks 0-2, 4, 6 and 7"),
        (range(0, 256, 2), "ranks 0, 2, 4, …, 254"),
        (range(7, 256, 8), "ranks 7, 15, 23, …, 255"),
        ([*range(0, 256, 2), 255], "ranks 0, 2, 4 and 126 others"),
        ([rank for rank in range(256) if rank != 7], "ranks 0-6 and 8-255"),
        ([rank for rank in range(64) if rank % 8], "ranks 1-7, 9-15, 17-23, 25-31, 33-39, 41-47, 49-55 and 57-63"),
    ],
)
def test_ranks_are_named_shortly(ranks: Sequence[int], said: str) -> None:
    assert rank_list(ranks) == said


def test_a_narrow_column_names_fewer() -> None:
    assert rank_list((0, 2, 5, 9, 11), 3) == "ranks 0, 2, 5 and 2 others"
