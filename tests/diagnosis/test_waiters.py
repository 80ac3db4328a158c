"""Who waits for whom, of ranks that wait in bunches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddpdoctor.diagnosis.divergence.waiting import Blocked, Waiters, standing_still

RANKS = range(8)
GRAPHS = st.dictionaries(
    st.sampled_from(RANKS), st.sets(st.sampled_from(RANKS), max_size=4).map(lambda ranks: tuple(sorted(ranks)))
)


def blocked_of(graph: dict[int, tuple[int, ...]]) -> dict[int, Blocked]:
    """Ranks that wait, each for the ranks that are given."""
    return {rank: Blocked(rank=rank, missing=missing, since_ns=rank) for rank, missing in graph.items()}


@given(graph=GRAPHS, start=st.sampled_from(RANKS))
def test_those_behind_a_rank_are_all_that_reach_it(graph: dict[int, tuple[int, ...]], start: int) -> None:
    behind: set[int] = set()
    while new := {rank for rank, missing in graph.items() if {start, *behind} & set(missing)} - behind:
        behind |= new
    assert Waiters(blocked_of(graph)).behind([start]) == behind


@given(graph=GRAPHS, stuck=st.frozensets(st.sampled_from(RANKS)))
def test_a_rank_stands_still_where_none_that_can_go_on_is_reached_from_it(
    graph: dict[int, tuple[int, ...]], stuck: frozenset[int]
) -> None:
    waiting = {rank for rank, missing in graph.items() if missing}
    free = {rank for missing in graph.values() for rank in missing} - waiting - stuck
    while new := {rank for rank in waiting if free & set(graph[rank])} - free:
        free |= new
    assert standing_still(blocked_of(graph), stuck) == waiting - free


def test_a_bunch_has_waited_since_its_first_rank_came() -> None:
    shared = (3,)
    waiters = Waiters({rank: Blocked(rank=rank, missing=shared, since_ns=10 - rank) for rank in (0, 1, 2)})
    (bunch,) = waiters.awaited[3]
    assert (bunch.ranks, bunch.since_ns) == ((0, 1, 2), 8)
