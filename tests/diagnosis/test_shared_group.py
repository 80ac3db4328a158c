"""What comes of a group that two threads use: a rank that waits in it, for one whose process a call of it has ended."""

from __future__ import annotations

from signal import SIGABRT, SIGKILL

import pytest

from ddpdoctor.diagnosis.divergence.divergence import Divergence
from ddpdoctor.diagnosis.divergence.next_calls import NextCall
from ddpdoctor.diagnosis.divergence_kind import parts_in
from ddpdoctor.record.streams.collectives import Group

RANKS = (0, 1)
WAITS = NextCall(rank=0, action="collective", group=Group(ranks=RANKS, backend="gloo"), waiting=True)


@pytest.mark.parametrize(
    ("signal", "ranks", "there"), [(SIGABRT, RANKS, True), (SIGKILL, RANKS, False), (SIGABRT, (0, 2), False)]
)
def test_who_waits_for_a_rank_that_the_group_has_aborted_waits_in_it(
    signal: int, ranks: tuple[int, ...], there: bool
) -> None:
    # As the record of such a job has it in one of 20 runs: the rank that died had no call of the group left open.
    turns = (WAITS, NextCall(rank=1, action="signalled", signal=signal))
    assert parts_in(Divergence(form="absentee", turns=turns, culprit=1), ranks) is there


def test_ranks_that_part_in_a_group_part_in_it() -> None:
    parted = Divergence(form="mismatch", group=WAITS.group, turns=(WAITS,))
    assert parts_in(parted, RANKS) and not parts_in(parted, (0, 2))
