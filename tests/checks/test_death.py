"""Why ranks died, on records of live runs built by hand."""

from __future__ import annotations

import signal
from typing import Any

import msgspec
import pytest

from ddpdoctor.checks.collectives import collective_timeout, early_exit
from ddpdoctor.checks.death import killed_rank, nccl_error, rank_out_of_memory, rendezvous_failure, root_exception
from ddpdoctor.checks.gradients import unused_parameters
from ddpdoctor.checks.speed import straggler
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.record.model import RankException, TensorInfo, Wrap
from ddpdoctor.record.streams.measured import RankHeartbeat
from tests.diagnosis.jobs import MILLISECOND_NS, JobBuilder
from tests.diagnosis.measured_job import MeasuredJob

LOST = "Connection closed by peer [127.0.0.1]:1234"
GLOO_TIMEOUT = "[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 60000ms for recv operation to complete"
NCCL_TIMEOUT = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=26, OpType=ALLREDUCE, NumelIn=1024, "
    "NumelOut=1024, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
)
EVERY_CHECK = (
    collective_timeout,
    early_exit,
    killed_rank,
    nccl_error,
    rank_out_of_memory,
    rendezvous_failure,
    root_exception,
)


def job(ranks: int = 2, **fields: Any) -> JobBuilder:
    return JobBuilder(ranks, **{"kind": "run", **fields})


def found(job: JobBuilder, **streams: Any) -> list[Finding]:
    record = job.record(**streams)
    return [item for check in EVERY_CHECK for item in check.in_run(record) if isinstance(item, Finding)]


def only(job: JobBuilder, **streams: Any) -> Finding:
    (finding,) = found(job, **streams)
    return finding


def heartbeats(*beats_ms: int, phase: Any = "backward", **fields: Any) -> tuple[RankHeartbeat, ...]:
    return tuple(
        RankHeartbeat(rank=rank, beat_at_ns=beat * MILLISECOND_NS, phase=phase, step=7, **fields)
        for rank, beat in enumerate(beats_ms)
    )


def lose_peer(job: JobBuilder, *ranks: int) -> JobBuilder:
    for rank in ranks:
        job.fail(rank, "RuntimeError", 50, LOST, communication=True)
    return job


@pytest.mark.parametrize(
    ("number", "title", "advice"),
    [
        (signal.SIGKILL, "rank 1 was killed by SIGKILL", "dmesg"),
        (signal.SIGSEGV, "rank 1 was killed by SIGSEGV", "core dump"),
        (None, "the process of rank 1 ended without an exception or an exit code", "dmesg"),
    ],
)
def test_the_rank_that_was_killed_is_named_and_not_those_that_lost_it(
    number: int | None, title: str, advice: str
) -> None:
    killed = job(3)
    killed.leave(1, "signalled", signal=number, pid=42, host="node7")
    finding = only(lose_peer(killed, 0, 2), heartbeats=heartbeats(5_000, 4_000, 5_000))
    assert (finding.code, finding.severity, finding.title, finding.ranks) == ("DDP703", Severity.ERROR, title, (1,))
    assert advice in finding.remedy
    assert [fact.text for fact in finding.evidence] == [
        "rank 1 was last seen in backward, step 7",
        "ranks 0 and 2 report a lost connection, which follows",
        "it was process 42 on node7",
    ]


def test_the_first_heart_to_stop_is_the_first_that_was_killed() -> None:
    vanished = job(3)
    for rank in vanished.ranks:
        vanished.leave(rank, "signalled")
    assert only(vanished, heartbeats=heartbeats(9_000, 9_100, 4_000)).ranks == (2,)


def test_processes_that_end_together_or_by_hand_were_ended_on_purpose() -> None:
    vanished, terminated, finished = job(2), job(2), job(2)
    for rank in (0, 1):
        vanished.leave(rank, "signalled")
        terminated.leave(rank, "signalled", signal=signal.SIGTERM)
        finished.leave(rank, "signalled", signal=signal.SIGABRT, main_finished=True)
    beats = heartbeats(4_000, 4_100)
    assert [found(gone, heartbeats=beats) for gone in (vanished, terminated, finished)] == [[], [], []]


def test_a_rank_that_the_launcher_ended_after_another_had_failed_is_none() -> None:
    failed = job(2)
    failed.fail(0, "KeyError", 60, "'label'")
    failed.leave(1, "signalled", signal=signal.SIGKILL)
    assert only(failed).code == "DDP706"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB."),
        ("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        ("MemoryError", ""),
        ("DistBackendError", "NCCL error in: x.cpp, ncclUnhandledCudaError: Cuda failure 'out of memory'"),
    ],
)
def test_one_ranks_want_of_memory_is_told_ahead_of_the_echoes(kind: str, message: str) -> None:
    failed = job(3)
    failed.fail(1, kind, 60, message)
    finding = only(lose_peer(failed, 0, 2))
    assert (finding.code, finding.ranks) == ("DDP702", (1,))
    assert finding.title == "rank 1 ran out of memory; the others fail because of it"


def test_the_class_of_an_nccl_error_says_what_is_behind_it() -> None:
    failed = job(3)
    message = "NCCL error in: ProcessGroupNCCL.cpp:1269, unhandled system error (run with NCCL_DEBUG=INFO), NCCL 2.21.5"
    failed.fail(2, "DistBackendError", 50, message)
    failed.fail(0, "DistBackendError", 50, "NCCL error in: x.cpp, remote process exited or there was a network error")
    finding = only(failed)
    assert (finding.code, finding.ranks) == ("DDP701", (2,))
    assert finding.title.startswith("NCCL failed on rank 2 first with a system error: a call of the operating system")
    same = job(2)
    for rank in same.ranks:
        same.fail(rank, "DistBackendError", 50, "ncclInvalidUsage: Duplicate GPU detected : ranks 1 and 0 both on 1b0")
    assert only(same).title == "NCCL failed on rank 0 first with an invalid usage: two ranks use the same GPU"


def test_a_lost_peer_of_nccl_is_no_cause_where_there_is_another() -> None:
    remote = "NCCL error in: x.cpp, remote process exited or there was a network error"
    killed, alone = job(2), job(2)
    killed.leave(1, "signalled", signal=signal.SIGKILL)
    for gone in (killed, alone):
        gone.fail(0, "DistBackendError", 50, remote, communication=True)
    assert only(killed).code == "DDP703"
    assert only(alone).code == "DDP701"


def test_a_timeout_names_the_rank_that_did_not_come_by_the_calls() -> None:
    measured = MeasuredJob(3).run(5, {"forward": 1.0}, barrier=True)
    raised = RankException(
        time_ns=round(70_000 * MILLISECOND_NS), type="RuntimeError", message=GLOO_TIMEOUT, communication=True
    )
    for rank in (0, 2):
        measured.call(rank, "barrier", 10_000.0, 70_000.0)
    ranks = tuple(
        rank if rank.rank == 1 else type(rank)(rank=rank.rank, end="raised", exceptions=(raised,))
        for rank in measured.record().ranks
    )
    (finding,) = collective_timeout.in_run(measured.record(ranks=ranks))
    assert isinstance(finding, Finding)
    assert finding.title == "ranks 0 and 2 timed out in barrier #5 after 60 s: rank 1 did not arrive"
    assert finding.evidence[1].text == "the last collective that all ranks reached is number 4"


def test_a_timeout_of_nccl_names_the_rank_that_is_behind() -> None:
    failed = job(3)
    failed.fail(0, "DistBackendError", 50, NCCL_TIMEOUT, communication=True)
    beats = tuple(
        RankHeartbeat(rank=rank, beat_at_ns=1, enqueued=enqueued, completed=25)
        for rank, enqueued in enumerate((26, 26, 25))
    )
    finding = only(failed, heartbeats=beats)
    assert finding.title == "rank 0 timed out in allreduce #26 at train.py:50 after 10 min: rank 2 did not arrive"
    monitored = job(2)
    monitored.fail(0, "RuntimeError", 50, "Rank 1 failed to pass monitoredBarrier in 2000 ms", communication=True)
    assert only(monitored).title == "rank 0 timed out in a collective at train.py:50 after 2.0 s: rank 1 did not arrive"


def test_a_timeout_behind_another_failure_is_an_echo() -> None:
    failed = job(2)
    failed.fail(1, "KeyError", 60, "'label'")
    failed.fail(0, "RuntimeError", 50, GLOO_TIMEOUT, communication=True)
    assert only(failed).code == "DDP706"


def test_who_presses_ctrl_c_is_not_told_that_the_script_is_broken() -> None:
    for lines in ((12, 12), (12, 14)):
        interrupted = job(2)
        for rank, line in zip(interrupted.ranks, lines, strict=True):
            interrupted.fail(rank, "KeyboardInterrupt", line, "")
        assert found(interrupted) == []


def test_an_exception_of_all_ranks_is_told_once_in_a_live_run_only() -> None:
    for kind, codes in (("run", ["DDP706"]), ("rehearsal", [])):
        failed = job(2, kind=kind)
        for rank in failed.ranks:
            failed.fail(rank, "FileNotFoundError", 12, "no such file: data.bin")
        assert [finding.code for finding in found(failed)] == codes


@pytest.mark.parametrize(
    ("message", "title"),
    [
        ("EADDRINUSE: The server socket has failed to listen on any local network address. port: 29500", "is in use"),
        ("Timed out after 901 seconds waiting for clients. 1/2 clients joined.", "in time: 1 of 2 ranks arrived"),
        (
            "The client socket has failed to connect to any network address of (node1, 29500).",
            "cannot reach the rendezvous store",
        ),
        (
            "Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: SO_ERROR: Connection refused",
            "cannot connect",
        ),
    ],
)
def test_ranks_that_could_not_meet_say_why(message: str, title: str) -> None:
    failed = job(2)
    failed.fail(0, "DistNetworkError", 10, message)
    finding = only(failed)
    assert finding.code == "DDP705" and title in finding.title


def test_ranks_that_never_came_are_named_after_a_minute() -> None:
    waiting = job(2, ranks_expected=4, world_size=0)
    for rank in waiting.ranks:
        waiting.wait_in_store("init_process_group", 10, rank)
    assert list(rendezvous_failure.in_run(waiting.record())) == []
    waiting.tick(70_000)
    (finding,) = rendezvous_failure.in_run(waiting.record())
    assert isinstance(finding, Finding)
    assert finding.title == "ranks 0 and 1 have waited 70 s in init_process_group for ranks 2 and 3"


def test_a_job_that_goes_on_has_no_cause_of_death() -> None:
    assert found(job(2), heartbeats=heartbeats(9_000, 9_000)) == []
    assert straggler.CHECK.severity.keys() == {"run"}


def test_the_indices_of_ddps_own_error_get_their_names() -> None:
    message = (
        "Expected to have finished reduction in the prior iteration before starting a new one. ...\nParameter indices "
        "which did not receive grad for rank 1: 1 3\n In addition, you can set the environment variable"
    )
    failed = job(2)
    for rank in failed.ranks:
        failed.fail(rank, "RuntimeError", 60, message)
    names = ("frozen", "body.weight", "head.weight", "body.bias", "head.bias")
    wraps = tuple(
        Wrap(
            rank=rank,
            wrap=0,
            module_class="Net",
            parameters=tuple(TensorInfo(name=name, shape=(2,), requires_grad=name != "frozen") for name in names),
        )
        for rank in failed.ranks
    )
    assert found(failed, wraps=wraps) == []
    (finding,) = unused_parameters.in_run(failed.record(wraps=wraps))
    assert isinstance(finding, Finding)
    assert finding.title.endswith("parameters of Net got no gradient (4 elements, 0 bytes): head.bias, head.weight")
    assert finding.location is not None and finding.location.line == 60
    assert [failure.code for failure in found(failed)] == ["DDP706"]
    shorter = tuple(msgspec.structs.replace(wrap, parameters=wrap.parameters[:3]) for wrap in wraps)
    assert list(unused_parameters.in_run(failed.record(wraps=shorter))) == []
