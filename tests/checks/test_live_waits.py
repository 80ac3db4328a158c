"""Waits for ranks that are busy elsewhere, and barriers, on records of live runs built by hand."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from ddpdoctor.checks.collectives import barrier_in_hot_loop, long_wait
from ddpdoctor.diagnosis.wording import milliseconds_text
from ddpdoctor.finding import Finding, Frame, Severity
from ddpdoctor.record.model import Site
from ddpdoctor.record.streams.collectives import Group
from ddpdoctor.record.streams.measured import RankHeartbeat
from tests.diagnosis.measured_job import MILLISECOND_NS, MeasuredJob

STEP = {"forward": 20.0, "backward": 40.0, "optimizer": 5.0}
SITES = (Site((Frame("/job/train.py", 70, "train"),)), Site((Frame("/job/train.py", 60, "evaluate"),)))
MINUTE_NS = 60_000_000_000


def said(check: ModuleType, job: MeasuredJob, **streams: Any) -> list[Finding]:
    return list(check.in_run(job.record(**{"sites": SITES, **streams})))


def with_timeout(job: MeasuredJob, timeout_ns: int) -> MeasuredJob:
    job.groups = [Group(ranks=job.ranks, backend="gloo", timeout_ns=timeout_ns)]
    return job


def evaluating_on_rank_zero(seconds: float) -> MeasuredJob:
    """Rank 0 works alone between two steps while the others wait in a barrier."""
    job = MeasuredJob(3).run(30, STEP)
    start, end = job.now_ms[1], job.now_ms[1] + 1_000.0 * seconds
    for rank in job.ranks:
        job.call(rank, "barrier", end if rank == 0 else start, end + 1.0, site=0)
        job.now_ms[rank] = end + 1.0
    return job.run(5, STEP)


def test_a_wait_near_the_timeout_says_who_waited_for_whom() -> None:
    (finding,) = said(long_wait, with_timeout(evaluating_on_rank_zero(400.0), 10 * MINUTE_NS))
    assert finding.title == "ranks 1 and 2 waited 7 min in barrier at train.py:70 for rank 0; the timeout is 10 min"
    assert (finding.severity, finding.ranks) == (Severity.WARNING, (0,))
    assert finding.location is not None and finding.location.line == 70


def test_a_wait_far_from_the_timeout_or_without_one_is_left_alone() -> None:
    assert said(long_wait, with_timeout(evaluating_on_rank_zero(200.0), 10 * MINUTE_NS)) == []
    assert said(long_wait, with_timeout(evaluating_on_rank_zero(400.0), 0)) == []


def test_a_wait_that_lasts_says_where_the_late_rank_is() -> None:
    job = with_timeout(MeasuredJob(3).run(30, STEP), 10 * MINUTE_NS)
    start = job.now_ms[1]
    for rank in (1, 2):
        job.call(rank, "barrier", start + rank, 0.0, site=0)
    job.now_ms[0] += 400_000.0
    heartbeat = RankHeartbeat(rank=0, beat_at_ns=1, phase="evaluation", site=1)
    (finding,) = said(long_wait, job, heartbeats=(heartbeat,))
    assert finding.title == (
        "ranks 1 and 2 have waited 7 min in barrier at train.py:70 for rank 0, busy in evaluation at train.py:60; "
        "the timeout is 10 min"
    )
    assert [location.line for location in finding.locations] == [70, 60]


def test_ranks_in_backward_wait_for_one_that_is_elsewhere() -> None:
    job = with_timeout(MeasuredJob(2).run(30, STEP), 10 * MINUTE_NS)
    since_ns = round(job.now_ms[0] * MILLISECOND_NS)
    job.now_ms[0] += 360_000.0
    inside = RankHeartbeat(rank=0, beat_at_ns=1, phase="backward", phase_since_ns=since_ns)
    outside = RankHeartbeat(rank=1, beat_at_ns=1, phase="other", phase_since_ns=since_ns, site=1)
    (finding,) = said(long_wait, job, heartbeats=(inside, outside))
    assert finding.title.startswith("rank 0 has waited 6 min in backward for rank 1, busy at train.py:60;")
    both = (inside, RankHeartbeat(rank=1, beat_at_ns=1, phase="backward", phase_since_ns=since_ns))
    assert said(long_wait, job, heartbeats=both) == []


def test_a_late_rank_in_backward_counts_as_well() -> None:
    job = MeasuredJob(2).run(20, STEP).run(1, STEP, {1: {"forward": 400_000.0}}).run(20, STEP)
    (finding,) = said(long_wait, with_timeout(job, 10 * MINUTE_NS))
    assert finding.title == "rank 0 waited 7 min in backward for rank 1; the timeout is 10 min"


def test_the_root_of_a_broadcast_does_not_wait_for_the_others() -> None:
    job = with_timeout(MeasuredJob(2, kinds=("barrier", "broadcast")).run(30, STEP), 10 * MINUTE_NS)
    start = job.now_ms[0]
    job.call(0, "broadcast", start, start + 1.0)
    job.call(1, "broadcast", start + 400_000.0, start + 400_001.0)
    assert said(long_wait, job) == []


def test_a_group_that_would_have_given_up_has_an_unfit_timeout() -> None:
    job = with_timeout(evaluating_on_rank_zero(50.0), 30 * MINUTE_NS)
    job.groups.append(Group(ranks=(0, 1), backend="gloo", timeout_ns=MINUTE_NS // 2))
    job.groups.append(Group(ranks=(1, 2), backend="gloo", timeout_ns=MINUTE_NS // 2))
    (finding,) = said(long_wait, job)
    assert finding.title == (
        "ranks 1 and 2 waited 50 s in barrier at train.py:70 for rank 0, and the 1st group made of ranks 0 and 1 "
        "would have timed out after 30 s"
    )
    assert finding.severity is Severity.ADVICE
    assert said(long_wait, with_timeout(evaluating_on_rank_zero(50.0), 10 * MINUTE_NS)) == []


@pytest.mark.parametrize(("cost_ms", "severity"), [(5.0, Severity.WARNING), (0.2, Severity.ADVICE)])
def test_a_barrier_in_every_step_says_what_it_costs(cost_ms: float, severity: Severity) -> None:
    job = MeasuredJob(2)
    for _ in range(40):
        job.run(1, {**STEP, "other": 10.0})
        for rank, early in ((0, 1.0), (1, 0.0)):
            end = job.now_ms[rank] - 1.0
            job.call(rank, "barrier", end - cost_ms - early, end, site=0)
    (finding,) = said(barrier_in_hot_loop, job)
    blocked = milliseconds_text((cost_ms + 0.5) * MILLISECOND_NS)
    assert finding.title == (
        f"every training step waits in barrier at train.py:70 ({blocked}, 0.50 ms of it waiting for the last rank), "
        "although "
        "backward already synchronises the ranks"
    )
    assert finding.severity is severity
    assert finding.evidence[0].text == "each rank called it 37 times"


def test_a_barrier_in_some_steps_or_outside_of_them_is_none() -> None:
    job = MeasuredJob(2)
    for step in range(40):
        job.run(1, STEP, barrier=step % 2 == 0)
    assert said(barrier_in_hot_loop, job) == []
