"""Ranks are named with their machine, where there are several."""

from __future__ import annotations

import msgspec
import pytest

from ddpdoctor.diagnosis.wording import only_lost_their_peers, placed
from ddpdoctor.record.model import Job, Rank, RankException, RunRecord

FOUR = RunRecord(
    job=Job(kind="run", world_size=4),
    ranks=tuple(Rank(rank=rank, host=f"node{rank // 2}", end="running") for rank in range(4)),
)


@pytest.mark.parametrize(
    ("title", "said"),
    [
        ("rank 3 keeps the others waiting", "rank 3 on node1 keeps the others waiting"),
        ("ranks 2 and 3 keep the others waiting", "ranks 2 and 3 on node1 keep the others waiting"),
        ("ranks 0-2 wait for rank 3", "ranks 0-2 wait for rank 3"),
        ("ranks 0, 2, 4, …, 254 wait", "ranks 0, 2, 4, …, 254 wait"),
        ("ranks 2, 3, 3 and 1 others wait", "ranks 2, 3, 3 and 1 others wait"),
        ("the process of rank 0 was gone", "the process of rank 0 on node0 was gone"),
        ("something of rank 3", "something of rank 3 on node1"),
        ("all 4 ranks wait", "all 4 ranks wait"),
        ("rank 9 is nowhere", "rank 9 is nowhere"),
    ],
)
def test_the_ranks_that_are_named_first_are_placed(title: str, said: str) -> None:
    assert placed(title, FOUR) == said


def test_on_one_machine_nothing_is_said_of_it() -> None:
    assert placed("rank 1 is late", msgspec.structs.replace(FOUR, ranks=FOUR.ranks[:2])) == "rank 1 is late"


def failed(rank: int, *, echo: bool, time_ns: int = 5) -> Rank:
    raised = RankException(time_ns=time_ns, type="RuntimeError", message="", communication=echo)
    return Rank(rank=rank, end="raised", ended_ns=time_ns, exceptions=(raised,))


def test_ranks_that_only_lost_their_peers_out_of_sight_are_no_cause() -> None:
    def of(*ranks: Rank) -> tuple[int, ...]:
        return only_lost_their_peers(msgspec.structs.replace(FOUR, ranks=ranks))

    assert of(failed(0, echo=True), failed(1, echo=True)) == (0, 1)
    assert of(failed(0, echo=True), Rank(rank=1, end="signalled", ended_ns=9)) == (0,)
    assert of(failed(0, echo=True), Rank(rank=1, end="signalled", ended_ns=2)) == ()
    assert of(failed(0, echo=True), failed(1, echo=False)) == ()
    assert of(Rank(rank=0, end="finished"), Rank(rank=1, end="finished")) == ()
    assert of(*(failed(rank, echo=True) for rank in range(4))) == ()
