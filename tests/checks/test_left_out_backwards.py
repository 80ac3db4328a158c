"""Backwards that a rank of a live run left out, where no loader counts: since which step it is ahead of the others."""

from __future__ import annotations

from typing import Any

import pytest

from ddpdoctor.checks.collectives import rank_divergent_collective, silent_desync
from ddpdoctor.diagnosis.training.lone_forwards import LASTING_STEPS
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.record.model import Wrap
from ddpdoctor.record.streams.measured import RankHeartbeat
from ddpdoctor.record.streams.training import UnfollowedForward
from tests.diagnosis.jobs import JobBuilder

REACHED = 100


def left_out(job: JobBuilder, *places: tuple[int, int], forwards: int = 1, **fields: Any) -> dict[str, Any]:
    """What ranks left out at which steps, as streams of a record."""
    site = job.site(17)
    return {
        "wraps": tuple(Wrap(rank=rank, wrap=0, ranks=job.ranks) for rank in job.ranks),
        "heartbeats": tuple(RankHeartbeat(rank=rank, beat_at_ns=1, step=REACHED) for rank in job.ranks),
        "unfollowed_forwards": tuple(
            UnfollowedForward(rank=rank, wrap=0, forwards=forwards, step=step, site=site, **fields)
            for rank, step in places
        ),
    }


def said(job: JobBuilder, streams: dict[str, Any], check: Any = silent_desync) -> list[Finding]:
    return [found for found in check.in_run(job.record(**streams)) if isinstance(found, Finding)]


def parted(ranks: int = 2) -> JobBuilder:
    """A job whose rank 1 calls a barrier while the others are in a backward that it does not come to."""
    job = JobBuilder(ranks, kind="run")
    for _ in range(3):
        job.reduce_gradients(job.ranks)
    job.reduce_gradients([rank for rank in job.ranks if rank != 1])
    for rank in job.ranks:
        job.columns[rank]["completed_ns"][-1] = 0
    job.call(1, "barrier", 24, completed=False)
    return job


def test_a_backward_that_one_rank_leaves_out_is_a_warning_once_it_has_lasted() -> None:
    job = JobBuilder(3, kind="run")
    (finding,) = said(job, left_out(job, (1, 6)))
    assert (finding.severity, finding.ranks) == (Severity.WARNING, (1,))
    assert finding.title == (
        "in step 6 rank 1 ran the training forward at train.py:17 once more than ranks 0 and 2, without its backward: "
        "from there on, gradients of different steps are averaged"
    )
    assert [place.line for place in finding.locations] == [17]
    assert [fact.text for fact in finding.evidence] == [
        "rank 1 made 2 training forwards and one backward in step 6, and by now has left out 1 backward more than "
        "others",
        "ranks 0 and 2 made 1 training forward for one backward there",
    ]


def test_a_lead_that_another_rank_takes_over_is_dated_by_the_newer_one() -> None:
    job = JobBuilder(2, kind="run")
    rows = [
        left_out(job, *where, forwards=often)["unfollowed_forwards"] for where, often in (([(1, 5)], 1), ([(0, 9)], 2))
    ]
    (finding,) = said(job, left_out(job) | {"unfollowed_forwards": rows[0] + rows[1]})
    assert finding.ranks == (0,)
    assert finding.title.startswith(
        "in step 9 rank 0 ran the training forward at train.py:17 2 times more than rank 1,"
    )


def test_the_rank_that_was_first_ahead_is_the_one_of_that_step() -> None:
    job = JobBuilder(3, kind="run")
    (finding,) = said(job, left_out(job, (1, 5), (2, 7)))
    assert finding.ranks == (1, 2)
    assert finding.title.startswith("in step 5 rank 1 ran the training forward at train.py:17 once more than rank 0,")


@pytest.mark.parametrize(
    "places",
    [
        [],
        [(0, 6), (1, 6)],
        [(0, 6), (1, 9)],
        [(1, REACHED - LASTING_STEPS + 1)],
        [(1, step) for step in range(1, REACHED, 9)],
        [(rank, step) for step in range(1, REACHED) for rank in (0, 1) if rank or step > 1],
    ],
    ids=["none", "all ranks alike", "in turns", "just now", "often", "several forwards for each backward"],
)
def test_forwards_that_prove_nothing_are_left_alone(places: list[tuple[int, int]]) -> None:
    job = JobBuilder(2, kind="run")
    assert said(job, left_out(job, *places)) == []


def test_a_rank_that_is_told_of_no_further_is_compared_until_then() -> None:
    job = JobBuilder(2, kind="run")
    streams = left_out(job, (0, 6), (1, 6), (1, 7), last=True)
    assert said(job, streams) == []
    (finding,) = said(job, left_out(job, (1, 6), last=True) | {"heartbeats": left_out(job)["heartbeats"]})
    assert finding.ranks == (1,)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_part_after_training_are_laid_to_the_backward_that_one_left_out(ranks: int) -> None:
    job = parted(ranks)
    streams = left_out(job, *((rank, 3) for rank in job.ranks), (1, 6), forwards=2)
    (finding,) = said(job, streams)
    assert (finding.severity, finding.ranks) == (Severity.ERROR, (1,))
    others = "rank 0" if ranks == 2 else "ranks 0 and 2"
    assert finding.title.startswith(
        f"in step 6 rank 1 ran the training forward at train.py:17 2 times more than {others}, without its backward: "
    )
    assert "are averaged, and in the end rank 1 " in finding.title
    assert {17, 24} <= {place.line for place in finding.locations}
    assert said(job, streams, rank_divergent_collective) == []


def test_a_rank_that_left_one_out_and_is_in_a_backward_itself_is_not_the_reason() -> None:
    job = parted()
    streams = left_out(job, (0, 6))
    (warning,) = said(job, streams)
    assert warning.severity is Severity.WARNING
    (finding,) = said(job, streams, rank_divergent_collective)
    assert finding.severity is Severity.ERROR
    assert "let none leave one out" in finding.remedy
