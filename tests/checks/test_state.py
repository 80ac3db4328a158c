from __future__ import annotations

from typing import Any

import pytest

from ddpdoctor.checks.state.save_on_all_ranks import in_run
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.record.streams.training import FileEvent
from tests.diagnosis.jobs import JobBuilder, healthy_job


def finished_job() -> JobBuilder:
    job = healthy_job()
    for rank in job.ranks:
        job.leave(rank, "finished", main_finished=True)
    return job


def write(job: JobBuilder, rank: int, path: str, action: Any = "save", line: int = 80) -> FileEvent:
    return FileEvent(rank=rank, action=action, path=path, site=job.site(line), time_ns=job.tick())


def results(job: JobBuilder, *events: FileEvent) -> list[Finding | Refuted]:
    return list(in_run(job.record(files=events)))


@pytest.mark.parametrize("action", ["save", "write", "create"])
def test_one_path_written_by_both_ranks_is_an_error(action: Any) -> None:
    job = finished_job()
    (finding,) = results(job, *(write(job, rank, "/job/last.pt", action) for rank in job.ranks))
    assert isinstance(finding, Finding)
    assert (finding.severity, finding.ranks) == (Severity.ERROR, (0, 1))
    verb = "save" if action == "save" else "write"
    assert finding.title == f"ranks 0 and 1 {verb} the same file last.pt at train.py:80"
    assert [fact.text for fact in finding.evidence] == ["ranks 0 and 1 wrote job/last.pt"]


def test_how_often_each_rank_wrote_is_said() -> None:
    job = finished_job()
    (finding,) = results(job, *(write(job, rank, "/job/runs/last.pt", "save") for rank in (0, 0, 1, 1, 1)))
    assert isinstance(finding, Finding)
    assert [fact.text for fact in finding.evidence] == ["ranks 0 and 1 wrote runs/last.pt up to 3 times"]


def test_processes_that_never_met_as_ranks_have_another_fault() -> None:
    job = finished_job()
    job.job["world_size"] = 0
    assert results(job, *(write(job, rank, "/job/last.pt") for rank in job.ranks)) == []


def test_many_paths_of_one_line_are_one_finding() -> None:
    job = finished_job()
    events = [write(job, rank, f"/job/{name}.npy", "create") for name in range(50) for rank in job.ranks]
    (finding,) = results(job, *events)
    assert isinstance(finding, Finding)
    assert "0.npy and 49 more files" in finding.title
    assert len(finding.evidence) == 4


def test_a_write_of_rank_zero_alone_refutes_the_suspicion() -> None:
    job = finished_job()
    (refuted,) = results(job, write(job, 0, "/job/last.pt"))
    assert isinstance(refuted, Refuted)
    assert refuted.location.line == 80


def test_paths_with_the_rank_in_them_refute_the_suspicion() -> None:
    job = finished_job()
    (refuted,) = results(job, *(write(job, rank, f"/job/rank{rank}.pt") for rank in job.ranks))
    assert isinstance(refuted, Refuted)


def test_a_lone_writer_in_a_run_that_was_cut_short_proves_nothing() -> None:
    job = healthy_job()
    job.job["stop_reason"] = "proof"
    assert results(job, write(job, 0, "/job/last.pt")) == []


@pytest.mark.parametrize(
    "path", ["/job/train.log", "/job/.cache/tokens.bin", "/job/runs/events.out.tfevents.1", "/job/a.lock", "/job/log_0"]
)
def test_logs_locks_and_caches_are_left_out(path: str) -> None:
    job = finished_job()
    assert not any(
        isinstance(result, Finding) for result in results(job, *(write(job, rank, path, "write") for rank in job.ranks))
    )


def test_ranks_that_write_in_turn_do_no_harm() -> None:
    job = healthy_job()
    first = write(job, 0, "/job/results.csv", "write")
    job.call(job.ranks, "barrier", 90)
    second = write(job, 1, "/job/results.csv", "write")
    assert results(job, first, second) == []
