"""Replicas of a live run that are no longer the same, from digests that are built by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpdoctor.check import Verdict
from ddpdoctor.diagnosis.training.replicas import drifted_digests
from ddpdoctor.record.streams.training import ReplicaDigest
from tests.checks.replicas import NAMES, Replicas


def found(ranks: int, *steps: Mapping[int, str], **fields: Any) -> list[Verdict]:
    """What is found of the last parameter's digests, by rank, after 100, 200 … steps."""
    rows = [
        ReplicaDigest(
            rank=rank,
            wrap=0,
            step=100 * number,
            iterations=fields.get("iterations", {}).get(rank, 100 * number),
            digests={NAMES[0]: "1", NAMES[1]: digest},
        )
        for number, digests in enumerate(steps, 1)
        for rank, digest in digests.items()
    ]
    job = Replicas(ranks)
    return list(drifted_digests(job.seen(replica_digests=tuple(rows))))


def test_the_odd_one_of_three_is_named_with_the_steps_around_it() -> None:
    (one,) = found(3, {0: "a", 1: "a", 2: "a"}, {0: "b", 1: "x", 2: "b"}, {0: "c", 1: "y", 2: "c"})
    assert one.sentence.endswith(f"after step 200: rank 1 has other ones than the rest, of {NAMES[1]} first")
    assert [reason[0] for reason in one.reasons[:2]] == [
        f"1 of 2 parameters differ: {NAMES[1]}",
        "they were the same after step 100",
    ]
    assert one.ranks == (1,)


def test_of_two_none_is_the_odd_one() -> None:
    (one,) = found(2, {0: "a", 1: "b"})
    assert "ranks 0 and 1 do not agree" in one.sentence
    assert (one.ranks, one.reasons[1][0]) == ((0, 1), "they were compared for the first time")


def test_ranks_that_are_not_there_or_at_other_reductions_are_not_compared() -> None:
    assert found(3, {0: "a", 1: "b"}) == []
    assert found(2, {0: "a", 1: "b"}, iterations={1: 99}) == []
    assert found(2, {0: "a", 1: "a"}) == []
