"""Lines that run many small collectives a step, on records that are built by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ddpdoctor.checks.speed import many_small_collectives
from ddpdoctor.finding import Finding, FoundInRun, Frame, Refuted, Severity
from ddpdoctor.record.model import Site
from ddpdoctor.record.streams.training import Backward
from tests.diagnosis.jobs import JobBuilder
from tests.diagnosis.measured_job import MeasuredJob

STEP = {"forward": 20.0, "backward": 40.0, "optimizer": 5.0, "other": 10.0}
SITES = (Site((Frame("/job/train.py", 70, "train"),)),)


def rehearsed(calls: Sequence[int], elements: int = 8, subject: str = "weight") -> list[FoundInRun]:
    """What is said of steps with so many reductions of one line each, in a loop whose turns have a subject."""
    job = JobBuilder(2)
    for number in calls:
        job.streams["backwards"] = (
            *job.streams.get("backwards", ()),
            *(Backward(rank=rank, site=job.site(50), time_ns=job.tick()) for rank in job.ranks),
        )
        for turn in range(number):
            about: dict[str, Any] = {"subject": f"{subject} {turn}"} if subject else {}
            job.call(job.ranks, "all_reduce", 70, elements, reduce_op="sum", **about)
    return list(many_small_collectives.in_run(job.record()))


def test_one_collective_for_each_tensor_is_told_with_their_number() -> None:
    (finding,) = rehearsed([40] * 6)
    assert isinstance(finding, Finding)
    assert finding.title == (
        "every training step runs 40 small collectives one after the other at train.py:70, 32 bytes each"
    )
    assert finding.severity is Severity.ADVICE
    assert finding.evidence[0].text == "each rank ran all_reduce 240 times in 6 steps"


@pytest.mark.parametrize(
    ("calls", "elements", "reason"),
    [([2] * 6, 8, "it runs 2 times a step, 32 bytes each"), ([9] * 6, 1 << 20, "it runs 9 times a step, 4.2 MB each")],
    ids=["few", "large"],
)
def test_few_or_large_ones_are_no_reason(calls: list[int], elements: int, reason: str) -> None:
    (refuted,) = rehearsed(calls, elements)
    assert isinstance(refuted, Refuted)
    assert (refuted.location.line, refuted.reason) == (70, reason)


def test_what_is_rare_or_no_loop_of_the_script_says_nothing() -> None:
    assert rehearsed([40, 0, 0, 40, 0, 0]) == [], "in some steps"
    assert rehearsed([40, 40]) == [], "in few steps"
    assert rehearsed([40] * 6, subject="") == [], "inside an operation of torch"


@pytest.mark.parametrize(
    ("calls", "cost_ms", "severity"), [(20, 0.4, Severity.WARNING), (20, 0.05, Severity.ADVICE), (3, 0.4, None)]
)
def test_a_live_run_says_what_they_cost(calls: int, cost_ms: float, severity: Severity | None) -> None:
    job = MeasuredJob(2, kinds=("all_reduce",))
    for _ in range(40):
        job.run(1, STEP)
        for rank in job.ranks:
            start = job.now_ms[rank] - 9.0
            for turn in range(calls):
                # The second rank comes later, and so waits less.
                entered = start + turn * cost_ms
                job.call(rank, "all_reduce", entered + 0.02 * rank, entered + cost_ms, site=0, size_bytes=64)
    found = [one for one in many_small_collectives.in_run(job.record(sites=SITES)) if isinstance(one, Finding)]
    assert [one.severity for one in found] == ([] if severity is None else [severity])
    if severity is Severity.WARNING:
        assert found[0].title.endswith("at train.py:70, 64 bytes each, which take 7.6 ms of the step (10%)")
