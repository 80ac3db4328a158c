from __future__ import annotations

import pytest

from ddpdoctor.diagnosis.performance.run_comparison import TooShort, compare
from ddpdoctor.record.streams.training import Loader
from ddpdoctor.report import blocks
from ddpdoctor.report.run import compare_text
from tests.diagnosis.measured_job import MeasuredJob
from tests.what_if.records import EVEN, bucketed, record_of


def noisy(forward_ms: float, steps: int = 120, seed: int = 0) -> MeasuredJob:
    """Steps that differ by a few milliseconds among themselves."""
    job = MeasuredJob(2)
    for number in range(steps):
        swing = ((number * 7919 + seed * 104_729) % 13 - 6) * 0.5
        job.run(1, {**EVEN, "forward": forward_ms + swing}, transfer=18.0, hidden=30.0)
    return job


def test_two_runs_of_one_job_differ_by_noise_only() -> None:
    compared = compare(record_of(noisy(10.0, seed=1)), record_of(noisy(10.0, seed=2)))
    assert not compared.step.is_change
    assert not compared.is_regression(0.0)
    assert compared.settings == ()


def test_a_slower_forward_is_a_change_and_its_phase_is_named() -> None:
    compared = compare(record_of(noisy(10.0)), record_of(noisy(20.0)))
    assert compared.step.ratio == pytest.approx(82 / 72, abs=0.01)
    assert compared.step.low < 82 / 72 < compared.step.high
    assert [phase.name for phase in compared.phases if phase.is_change] == ["forward"]
    assert compared.is_regression(0.05)
    assert not compared.is_regression(0.2)
    assert not compare(record_of(noisy(20.0)), record_of(noisy(10.0))).is_regression(0.0)


def test_what_was_set_differently_is_told() -> None:
    one = record_of(bucketed(2, 60), options={"bucket_cap_mb": 25})
    other = record_of(bucketed(2, 60), options={"bucket_cap_mb": 50}, workers=4)
    assert compare(one, other).settings == (("DDP bucket_cap_mb", "25", "50"), ("loader workers", "0", "4"))


@pytest.mark.parametrize(
    ("before_ms", "after_ms", "said"),
    [(10.0, 20.0, "SLOWER: a step is 13.9% longer ("), (30.0, 10.0, "FASTER: a step is 21.7% shorter (")],
)
def test_the_verdict_says_longer_or_shorter(before_ms: float, after_ms: float, said: str) -> None:
    compared = compare(record_of(noisy(before_ms)), record_of(noisy(after_ms)))
    page = compare_text.page(compared, [], [], 0.05, "one and other")
    assert page.answer.startswith(said)
    assert blocks.rendered(page, 80, colour=False).startswith(said)
    assert compared.other_work == ()


def test_steps_of_other_work_are_said_to_be_no_comparison() -> None:
    one = record_of(noisy(10.0), loaders=(Loader(rank=0, loader=0, site=0, batch_size=32),))
    other = record_of(noisy(20.0), loaders=(Loader(rank=0, loader=0, site=0, batch_size=64),))
    compared = compare(one, other)
    assert compared.other_work == ("batch size",)
    page = compare_text.page(compared, [], [], 0.05, "one and other")
    assert "not the same work: the runs differ in batch size" in blocks.rendered(page, 100, colour=False)


def test_a_run_that_is_too_short_is_named() -> None:
    with pytest.raises(TooShort) as told:
        compare(record_of(bucketed(2, 60)), record_of(bucketed(2, 10)))
    assert (told.value.position, told.value.steps) == (1, 7)
