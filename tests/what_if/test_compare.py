from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpdoctor.diagnosis.performance.run_comparison import TooShort, compare
from tests.diagnosis.measured_job import MeasuredJob
from tests.what_if.conftest import Ddpdoctor
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


def test_a_run_that_is_too_short_is_named() -> None:
    with pytest.raises(TooShort) as told:
        compare(record_of(bucketed(2, 60)), record_of(bucketed(2, 10)))
    assert (told.value.position, told.value.steps) == (1, 7)


def test_the_command_exits_with_1_on_a_regression(ddpdoctor: Ddpdoctor, very_late_run: Path, even_run: Path) -> None:
    slower = ddpdoctor("compare", str(even_run), str(very_late_run))
    assert slower.returncode == 1, slower.stderr
    assert slower.stdout.startswith("SLOWER")
    assert "straggler (DDP403)" in slower.stdout
    faster = ddpdoctor("compare", str(very_late_run), str(even_run), "--output-format", "json")
    assert faster.returncode == 0
    told = json.loads(faster.stdout)
    assert not told["regression"]
    assert told["step"]["high"] < 1
    assert "DDP403" in [finding["code"] for finding in told["findings_gone"]]
    assert "arguments" in [entry["name"] for entry in told["settings"]]
    assert ddpdoctor("compare", str(even_run), str(very_late_run), "--allowed-growth", "900%").returncode == 0


def test_a_run_compared_with_itself_has_not_changed(ddpdoctor: Ddpdoctor, late_run: Path) -> None:
    told = ddpdoctor("compare", str(late_run), str(late_run))
    assert told.returncode == 0
    assert told.stdout.startswith("NO CHANGE")
    assert ddpdoctor("compare", str(late_run), "nowhere/run").returncode == 2
