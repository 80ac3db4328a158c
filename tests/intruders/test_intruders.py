"""A few rows of the table of ``python -m tests.intruders``, and all of it with ``-m full``."""

from __future__ import annotations

import pytest

from tests.intruders.__main__ import ATTACKS, rows
from tests.intruders.rogue_heads import ROGUE_HEADS

_SAMPLE = (
    "1,100 idle connections",
    "100 unfinished frames of 8 MiB",
    "the rank of this machine",
    "16 screens that read nothing",
    "metrics: 64 slow requests",
    "metrics: 200 slow readers",
)


@pytest.mark.timeout(300)
def test_a_sample_of_attacks_harms_nothing() -> None:
    found = list(rows(_SAMPLE))
    assert [row for row in found if row.wrong] == []
    assert len(found) == len(_SAMPLE) + 1


def test_there_are_more_than_60_attacks() -> None:
    assert len(ATTACKS) + len(ROGUE_HEADS) > 60
    assert ATTACKS.keys().isdisjoint(ROGUE_HEADS)


@pytest.mark.full
@pytest.mark.timeout(1_200)
def test_no_attack_harms_anything() -> None:
    assert [row for row in rows([*ATTACKS, *ROGUE_HEADS]) if row.wrong] == []
