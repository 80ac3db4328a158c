from __future__ import annotations

from collections.abc import Callable

import pytest

from ddpdoctor.checks.collectives import (
    collective_mismatch,
    early_exit,
    hang,
    rank_divergent_collective,
    silent_desync,
)
from ddpdoctor.checks.data import uneven_inputs
from ddpdoctor.checks.death import root_exception
from ddpdoctor.finding import Finding, Severity
from tests.diagnosis.jobs import JobBuilder, healthy_job

CHECKS = {
    module.CHECK.code: module
    for module in (
        uneven_inputs,
        rank_divergent_collective,
        collective_mismatch,
        hang,
        early_exit,
        silent_desync,
        root_exception,
    )
}


def different_lines() -> JobBuilder:
    job = healthy_job()
    job.call(0, "all_reduce", 57)
    job.call(1, "barrier", 80)
    return job


def different_sizes() -> JobBuilder:
    job = healthy_job()
    job.call(0, "all_reduce", 57, 3)
    job.call(1, "all_reduce", 57, 4)
    return job


def stuck() -> JobBuilder:
    job = healthy_job()
    job.call(0, "barrier", 70)
    job.wait_in_last(0)
    job.of_rank[1]["stuck"] = True
    job.tick(6_000)
    return job


def left() -> JobBuilder:
    job = healthy_job()
    job.call(0, "barrier", 70)
    job.wait_in_last(0)
    job.leave(1, "left-by-exit", exit_code=0)
    return job


def other_steps() -> JobBuilder:
    job = healthy_job()
    job.step(0, 4)
    job.step(1, 5)
    job.reduce_gradients(job.ranks)
    return job


def crossed() -> JobBuilder:
    job = healthy_job()
    job.call(0, "all_reduce", 70)
    job.call(1, "all_reduce", 71)
    job.call(0, "all_reduce", 71)
    job.call(1, "all_reduce", 70)
    return job


def swapped() -> JobBuilder:
    job = healthy_job()
    for rank, order in enumerate(("ab", "ba")):
        for subject in order:
            job.call(rank, "all_reduce", 70, subject=subject)
    return job


def raised() -> JobBuilder:
    job = healthy_job()
    job.call(0, "barrier", 70)
    job.wait_in_last(0)
    job.fail(1, "ValueError", 66)
    return job


@pytest.mark.parametrize(
    ("build", "code", "severity", "remedy"),
    [
        (different_lines, "DDP301", Severity.ERROR, "Make every rank call all_reduce at train.py:57, or none"),
        (different_sizes, "DDP304", Severity.ERROR, "Make the number of elements the same on every rank"),
        (stuck, "DDP305", Severity.ERROR, "See in its stack what rank 1 stands in"),
        (left, "DDP306", Severity.ERROR, "Let all ranks leave together"),
        (other_steps, "DDP312", Severity.ERROR, "Let all ranks skip a step together"),
        (crossed, "DDP312", Severity.WARNING, "Call the two collectives in the same order"),
        (swapped, "DDP312", Severity.ERROR, "Go over the same order on every rank"),
        (raised, "DDP706", Severity.ERROR, "Fix the exception on rank 1"),
    ],
)
def test_one_divergence_gives_one_finding(
    build: Callable[[], JobBuilder], code: str, severity: Severity, remedy: str
) -> None:
    record = build().record()
    found = [result for check in CHECKS.values() for result in check.in_run(record)]
    assert len(found) == 1
    finding = found[0]
    assert isinstance(finding, Finding)
    assert (finding.code, finding.severity) == (code, severity)
    assert finding.remedy.startswith(remedy)
    assert finding.locations
    assert {0, 1} <= {fact.rank for fact in finding.evidence}
    assert finding.basis == {"rehearsal"}


def test_a_healthy_job_gives_none() -> None:
    job = healthy_job(4)
    for rank in job.ranks:
        job.leave(rank, "finished", main_finished=True)
    assert [result for check in CHECKS.values() for result in check.in_run(job.record())] == []
