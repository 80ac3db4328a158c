"""Ranks of a live run that averaged gradients different numbers of times over the same number of batches."""

from __future__ import annotations

from typing import Any

import pytest

from ddpdoctor.checks.collectives import early_exit, silent_desync
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.record.model import Wrap
from ddpdoctor.record.streams.measured import RankHeartbeat
from ddpdoctor.record.streams.training import Loader, Pass
from tests.diagnosis.jobs import JobBuilder


def _said(job: JobBuilder, *passes: Pass, check: Any = silent_desync) -> list[Finding]:
    site = job.site(12)
    wraps = tuple(Wrap(rank=rank, wrap=0, ranks=job.groups[-1 if rank > 1 else 0].ranks) for rank in job.ranks)
    loaders = tuple(Loader(rank=rank, loader=0, site=site) for rank in job.ranks)
    record = job.record(wraps=wraps, loaders=loaders, passes=passes)
    return [found for found in check.in_run(record) if isinstance(found, Finding)]


def _pass(job: JobBuilder, rank: int, averaged: int, **fields: Any) -> Pass:
    known = {"ordinal": 0, "yielded": 50, "end": "exhausted", "looped": True, **fields}
    return Pass(rank=rank, loader=0, site=job.site(20), averaged=averaged, **known)


def test_a_backward_that_one_rank_leaves_out_is_a_warning_while_the_job_goes_on() -> None:
    job = JobBuilder(2, kind="run")
    (finding,) = _said(
        job, _pass(job, 0, 50), _pass(job, 1, 49), _pass(job, 0, 50, ordinal=1), _pass(job, 1, 49, ordinal=1)
    )
    assert finding.severity is Severity.WARNING
    assert finding.title == (
        "in a pass of 50 batches for each rank 0 averaged gradients 50 times, rank 1 49: "
        "from there on, gradients of different steps are averaged"
    )
    assert [place.line for place in finding.locations] == [20]
    assert len(finding.evidence) == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"averaged": 50}),
        ({"joined": True}, {"joined": True}),
        ({"looped": False}, {"looped": False}),
        ({}, {"yielded": 49}),
        ({}, {"end": "open"}),
        ({"end": "open"}, {"end": "open"}),
        ({}, {"averaged": 0}),
        ({"averaged": None}, {"averaged": None}),
    ],
    ids=["the same", "join", "next", "uneven", "under way", "left by both", "no training there", "not counted"],
)
def test_passes_that_prove_nothing_are_left_alone(first: dict[str, Any], second: dict[str, Any]) -> None:
    job = JobBuilder(2, kind="run")
    assert _said(job, _pass(job, 0, **{"averaged": 50, **first}), _pass(job, 1, **{"averaged": 49, **second})) == []


def test_ranks_that_do_not_average_with_each_other_may_differ() -> None:
    job = JobBuilder(4, kind="run")
    job.groups[0] = job.groups[0].__class__(ranks=(0, 1))
    job.group(2, 3)
    averaged = (50, 50, 40, 40)
    assert _said(job, *(_pass(job, rank, number) for rank, number in enumerate(averaged))) == []
    (finding,) = _said(job, *(_pass(job, rank, number) for rank, number in enumerate((50, 50, 40, 39))))
    assert finding.ranks == (2, 3)


@pytest.mark.parametrize("end", ["finished", "left-by-exit"])
def test_a_rank_that_is_over_before_the_others_is_laid_to_the_backward_that_it_left_out(end: Any) -> None:
    job = JobBuilder(2, kind="run")
    for _ in range(49):
        job.reduce_gradients(job.ranks)
    job.leave(1, end, exit_code=0)
    job.reduce_gradients(0)
    job.wait_in_last(0)
    passes = _pass(job, 0, 49, end="open"), _pass(job, 1, 49)
    (finding,) = _said(job, *passes)
    assert finding.severity is Severity.ERROR
    left = "rank 1 ran to its end and left" if end == "finished" else "rank 1 left with exit code 0"
    averaged = "rank 0 averaged gradients 50 times, rank 1 49: from there on, gradients of different steps are averaged"
    assert f"{averaged}, and in the end {left}" in finding.title
    assert _said(job, *passes, check=early_exit) == []
    (early,) = _said(job, _pass(job, 0, 49, end="open", yielded=51), _pass(job, 1, 50), check=early_exit)
    assert early.title.startswith(left)


def test_the_rank_that_left_one_out_is_named_where_the_others_averaged_once_a_batch() -> None:
    job = JobBuilder(2, kind="run")
    (finding,) = _said(job, _pass(job, 0, 50), _pass(job, 1, 49))
    assert finding.ranks == (1,)
    (finding,) = _said(job, _pass(job, 0, 25), _pass(job, 1, 24))
    assert finding.ranks == (0, 1), "ranks that accumulate may count by something of their own"


def test_ranks_that_part_after_a_pass_are_laid_to_the_batch_that_one_left_out() -> None:
    job = JobBuilder(2, kind="run")
    for _ in range(3):
        job.reduce_gradients(job.ranks)
    job.reduce_gradients(0)
    job.columns[0]["completed_ns"][-1] = 0
    job.call(1, "barrier", 36, completed=False)
    (finding,) = _said(job, _pass(job, 0, 49, end="open"), _pass(job, 1, 49))
    assert (finding.severity, finding.ranks) == (Severity.ERROR, (1,))
    assert "in the end rank 1 calls barrier at train.py:36" in finding.title
    assert [place.line for place in finding.locations] == [20, 36, 50]


def test_without_a_loader_it_is_the_backward_that_did_not_follow_a_forward() -> None:
    job = JobBuilder(2, kind="run")
    for _ in range(5):
        job.reduce_gradients(job.ranks)
    job.leave(1, "finished")
    job.reduce_gradients(0)
    job.wait_in_last(0)
    wraps = tuple(Wrap(rank=rank, wrap=0, ranks=(0, 1)) for rank in job.ranks)

    def said(*made: tuple[int, int], check: Any = silent_desync) -> list[Finding]:
        heartbeats = tuple(
            RankHeartbeat(rank=rank, beat_at_ns=1, forwards=forwards, backwards=backwards)
            for rank, (forwards, backwards) in enumerate(made)
        )
        record = job.record(wraps=wraps, heartbeats=heartbeats)
        return [found for found in check.in_run(record) if isinstance(found, Finding)]

    (finding,) = said((6, 5), (6, 5))
    assert finding.ranks == (1,)
    assert finding.title == (
        "every rank made 6 training forwards, and rank 0 6 backwards, rank 1 5: in the end rank 1 ran to its end and "
        "left while rank 0 waits in all_reduce (DDP backward) at train.py:50"
    )
    assert said((6, 5), (6, 5), check=early_exit) == []
    (left,) = said((6, 5), (5, 5), check=early_exit)
    assert left.code == "DDP306", "a rank that made fewer steps of both left early"
