from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
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
from ddpdoctor.finding import Finding, Frame, Refuted, Severity
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.measured import RankHeartbeat
from ddpdoctor.record.streams.setup import StackDump
from ddpdoctor.record.streams.training import BufferState
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


def different_keys() -> JobBuilder:
    job = healthy_job()
    job.call(0, "all_reduce", 57, 3, entries_of="losses")
    job.call(1, "all_reduce", 57, 4, entries_of="losses")
    return job


def only_one_has_a_dict() -> JobBuilder:
    job = healthy_job()
    job.call(0, "all_reduce", 57, 3, entries_of="losses")
    job.call(1, "all_reduce", 57, 4)
    return job


def stuck() -> JobBuilder:
    job = healthy_job()
    job.call(0, "barrier", 70)
    job.wait_in_last(0)
    job.of_rank[1]["stuck"] = True
    job.tick(6_000)
    return job


def stuck_in_a_watched_job(stood_ms: int, *, beat_ms_ago: int = 100, **of_rank: Any) -> RunRecord:
    """Rank 1 has stood at one place for so long; its heart beat last some time ago."""
    job = stuck()
    job.of_rank[1].update(of_rank)
    now_ns = job.tick()
    beat_at_ns, unchanged_ms = now_ns - beat_ms_ago * 1_000_000, stood_ms - beat_ms_ago
    heartbeat = RankHeartbeat(rank=1, beat_at_ns=beat_at_ns, phase="other", unchanged_ms=unchanged_ms)
    record = job.record(heartbeats=(heartbeat,))
    return msgspec.structs.replace(record, job=msgspec.structs.replace(record.job, kind="run", ended_ns=now_ns))


def test_a_rank_at_the_prompt_of_a_debugger_is_told_so() -> None:
    library = "/usr/lib/python3.11/"
    frames = (
        Frame(library + "cmd.py", 126, "Cmd.cmdloop"),
        Frame(library + "bdb.py", 90, "Bdb.trace_dispatch"),
        Frame("/work/train.py", 62, "<module>"),
    )
    job = stuck()
    record = job.record(stacks=(StackDump(rank=1, thread="MainThread", main=True, time_ns=job.tick(), frames=frames),))
    (finding,) = hang.in_run(record)
    assert isinstance(finding, Finding)
    assert finding.remedy.startswith("Rank 1 is at a debugger prompt")


@pytest.mark.parametrize(
    ("record", "severity"),
    [
        (stuck_in_a_watched_job(20_000), Severity.WARNING),
        (stuck_in_a_watched_job(59_000, beat_ms_ago=50_000), Severity.WARNING),
        (stuck_in_a_watched_job(61_000), Severity.ERROR),
        (stuck_in_a_watched_job(61_000, beat_ms_ago=60_000), Severity.ERROR),
        (stuck_in_a_watched_job(20_000, stopped=True), Severity.ERROR),
    ],
    ids=["briefly", "silent", "long", "silent for long", "stopped"],
)
def test_a_rank_of_a_watched_job_that_does_nothing_is_called_hung_after_a_minute(
    record: RunRecord, severity: Severity
) -> None:
    (finding,) = hang.in_run(record)
    assert isinstance(finding, Finding)
    assert finding.severity is severity


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
        (different_keys, "DDP304", Severity.ERROR, "losses has 3 keys on rank 0 and 4 keys on rank 1"),
        (only_one_has_a_dict, "DDP304", Severity.ERROR, "Make the number of elements the same on every rank"),
        (stuck, "DDP305", Severity.ERROR, "Check in its stack where rank 1 is stuck"),
        (left, "DDP306", Severity.ERROR, "Let all ranks leave together"),
        (other_steps, "DDP312", Severity.ERROR, "Let all ranks skip a step together"),
        (crossed, "DDP312", Severity.WARNING, "Call the two collectives in the same order"),
        (swapped, "DDP312", Severity.ERROR, "Iterate in the same order on every rank"),
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
    results = (result for check in CHECKS.values() for result in check.in_run(job.record()))
    assert [result for result in results if not isinstance(result, Refuted)] == []


def test_a_buffer_that_has_grown_on_each_rank_in_its_own_way_is_named() -> None:
    job = healthy_job()
    for rank, size in enumerate((25, 27)):
        job.call(rank, "broadcast", 57, size, origin="ddp-forward", root=0)
    states = tuple(
        BufferState(rank=rank, wrap=0, forward=forward, digests=digests)
        for rank in (0, 1)
        for forward, digests in enumerate(({"mean": str(rank)}, {"mean": str(rank), "mask": f"of {25 + 2 * rank}"}))
    )
    (finding,) = collective_mismatch.in_run(job.record(buffers=states))
    assert isinstance(finding, Finding)
    assert "before each forward, and mask is not the same on all ranks" in finding.remedy
    (finding,) = collective_mismatch.in_run(job.record())
    assert isinstance(finding, Finding)
    assert "before each forward, and one of them is not the same on all ranks" in finding.remedy
