"""The run on one rank that others are measured against: what serves as one, and what is made of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.diagnosis.performance.summarise import summarise
from ddpdoctor.diagnosis.performance.summary import RunVerdict
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.monitor.build_snapshot import Look, build_snapshot
from ddpdoctor.monitor.history import HistoryWriter
from ddpdoctor.monitor.replay import Series
from ddpdoctor.monitor.snapshot import Snapshot
from ddpdoctor.profile.recorded_run import one_rank_samples_per_s
from ddpdoctor.record import layout
from ddpdoctor.report.run import run_json, run_text
from tests.diagnosis.measured_job import MeasuredJob


def _snapshot(job: MeasuredJob) -> Snapshot:
    record = job.record()
    verdict = RunVerdict(state="healthy", text="well")
    look = Look(now_ns=1, record=record, summary=summarise(record), verdict=verdict, state="ended")
    return build_snapshot(look, Series(), "train.py", "/run")


def _run(directory: Path, ranks: int, steps: int, samples: int = 32) -> Path:
    """The directory of a run whose steps take 20 ms."""
    directory.mkdir()
    (directory / layout.JOB_FILE).write_text('{"version": 1}')
    writer = HistoryWriter(directory)
    writer.write(_snapshot(MeasuredJob(ranks).run(steps, {"forward": 8, "backward": 12}, samples=samples)))
    writer.close()
    return directory


def test_a_run_of_one_rank_tells_its_throughput_and_others_say_why_they_do_not_serve(tmp_path: Path) -> None:
    assert one_rank_samples_per_s(str(_run(tmp_path / "one", 1, 60))) == pytest.approx(32 / 0.020)
    for directory, message in (
        (_run(tmp_path / "two", 2, 60), "has 2 ranks, and one with a single rank is needed"),
        (_run(tmp_path / "short", 1, 12), "9 steps of the run in .* were measured, and at least 20 are needed"),
        (_run(tmp_path / "uncounted", 1, 60, samples=0), "the samples per second of"),
        (tmp_path / "nowhere", "there is no run directory"),
    ):
        with pytest.raises(DdpDoctorError, match=message):
            one_rank_samples_per_s(str(directory))


def test_the_run_that_was_named_is_kept_with_the_job_that_is_compared_with_it(tmp_path: Path) -> None:
    one = _run(tmp_path / "one", 1, 60)
    command = (sys.executable, "-m", "ddpdoctor", "profile", "--run-dir", str(tmp_path / "run"))
    subprocess.run((*command, "--one-rank", str(one), "--", "true"), capture_output=True, check=True)
    plan = json.loads((tmp_path / "run" / layout.JOB_FILE).read_text())
    assert plan["job"]["one_rank_samples_per_s"] == pytest.approx(1_600)


def test_a_report_says_how_much_of_so_many_times_one_rank_a_job_reaches() -> None:
    snapshot = _snapshot(MeasuredJob(4, one_rank_samples_per_s=1_600.0).run(60, {"forward": 8, "backward": 17}))
    said = run_text.render(snapshot, "/job", 200, colour=False)
    assert "5,120 samples/s (80% of 4 times the 1,600 of one rank)" in said
    assert json.loads(run_json.render(snapshot, "/job"))["scaling_efficiency"] == pytest.approx(0.8)
