"""A rank that a collective ended at once, on records of live runs built by hand."""

from __future__ import annotations

import signal
from typing import Any

import msgspec
import pytest

from ddpdoctor.checks.collectives import collective_mismatch, rank_divergent_collective
from ddpdoctor.checks.death import killed_rank, root_exception
from ddpdoctor.diagnosis.failures import may_yet_be_known
from ddpdoctor.finding import Finding, Frame
from ddpdoctor.record.model import Rank, RankException, Site
from ddpdoctor.record.streams.measured import RankHeartbeat
from ddpdoctor.record.streams.setup import StackDump
from tests.diagnosis.measured_job import MILLISECOND_NS, MeasuredJob

SCRIPT = "/job/train.py"
SECOND_NS = 1_000_000_000
CALL, BACKWARD, OTHER_CALL = 0, 1, 2
SITES = tuple(Site((Frame(SCRIPT, line, "main"),)) for line in (24, 21, 30))
EVERY_CHECK = (collective_mismatch, killed_rank, rank_divergent_collective, root_exception)
KINDS = ("all_reduce", "barrier", "buffers")
IN_THE_CALL = (Frame("/torch/distributed/distributed_c10d.py", 3252, "all_reduce"), SITES[CALL].frames[0])
IN_BACKWARD = (Frame("/torch/autograd/graph.py", 979, "_engine_run_backward"), SITES[BACKWARD].frames[0])


def job(ranks: int = 2) -> MeasuredJob:
    return MeasuredJob(ranks, kinds=KINDS).run(5, {"forward": 1.0})


def died(rank: int, *, number: int | None = None) -> Rank:
    return Rank(rank=rank, end="signalled", signal=number, pid=42)


def lost_the_others(rank: int, site: int = BACKWARD, at_ms: float = 2_000.0, *, backward: bool = True) -> Rank:
    raised = RankException(
        time_ns=round(at_ms * MILLISECOND_NS),
        type="RuntimeError",
        message="Connection reset by peer",
        frames=SITES[site].frames,
        traceback="_engine_run_backward" if backward else "",
        communication=True,
    )
    return Rank(rank=rank, end="raised", exceptions=(raised,))


def heartbeat(rank: int, step: int, *, phase: Any = "finished") -> RankHeartbeat:
    return RankHeartbeat(rank=rank, beat_at_ns=2_000 * MILLISECOND_NS, phase=phase, step=step)


def stack(rank: int, frames: tuple[Frame, ...], *, native: bool = True) -> StackDump:
    time_ns = 2_000 * MILLISECOND_NS
    return StackDump(rank=rank, thread="main", main=True, frames=frames, time_ns=time_ns, native_end=native)


def terminated(rank: int, frames: tuple[Frame, ...]) -> StackDump:
    return msgspec.structs.replace(stack(rank, frames, native=False), of_the_end=True)


def found(
    job: MeasuredJob, *ranks: Rank, steps: tuple[int, ...], at_end: Any = "finished", **streams: Any
) -> list[Finding]:
    heartbeats = tuple(
        heartbeat(rank.rank, step, phase="other" if rank.end == "signalled" else at_end)
        for rank, step in zip(ranks, steps, strict=True)
    )
    record = job.record(**{"ranks": ranks, "heartbeats": heartbeats, "sites": SITES, **streams})
    return [item for check in EVERY_CHECK for item in check.in_run(record) if isinstance(item, Finding)]


def test_a_call_that_one_rank_made_alone_is_named_and_not_the_kernel() -> None:
    alone = job()
    alone.call(1, "all_reduce", 1_900.0, 0, size_bytes=4, site=CALL)
    (finding,) = found(alone, lost_the_others(0), died(1), steps=(6, 5))
    assert (finding.code, finding.ranks, finding.basis) == ("DDP301", (0, 1), frozenset({"run"}))
    assert finding.title == (
        "rank 1 died inside all_reduce (4 bytes) at train.py:24, while rank 0 was in backward at train.py:21 and has "
        "not called it"
    )
    assert "all_reduce at train.py:24" in finding.remedy
    assert {location.line for location in finding.locations} == {21, 24}


def test_in_the_same_step_it_takes_a_signal_of_the_communications_own_thread() -> None:
    alone = job()
    alone.call(1, "all_reduce", 1_900.0, 0, size_bytes=4, site=CALL)
    stacks = (stack(1, IN_THE_CALL),)
    aborted = died(1, number=signal.SIGABRT)
    assert [entry.code for entry in found(alone, lost_the_others(0), aborted, steps=(5, 5), stacks=stacks)] == [
        "DDP301"
    ]
    ended_at_once = found(alone, lost_the_others(0), aborted, steps=(5, 5), stacks=stacks, at_end="backward")
    assert [entry.code for entry in ended_at_once] == ["DDP301"], "the launcher left it the time for no more"
    killed = found(alone, lost_the_others(0), died(1, number=signal.SIGKILL), steps=(5, 5))
    assert [entry.code for entry in killed] == ["DDP703"]


def test_the_rank_that_died_may_be_the_one_that_did_not_call() -> None:
    alone = job()
    alone.call(1, "all_reduce", 1_900.0, 2_000.0, size_bytes=8_000_000, site=CALL)
    aborted = died(0, number=signal.SIGABRT)
    caller = lost_the_others(1, CALL, backward=False)
    (finding,) = found(alone, aborted, caller, steps=(5, 5), stacks=(stack(0, IN_BACKWARD),))
    assert finding.title == (
        "rank 0 died in backward at train.py:21, while rank 1 was inside all_reduce (8.0 MB) at train.py:24, which "
        "rank 0 has not called"
    )
    # A crash of its own code in backward comes from a thread that runs Python.
    own = died(0, number=signal.SIGSEGV)
    (finding,) = found(alone, own, caller, steps=(5, 5), stacks=(stack(0, IN_BACKWARD, native=False),))
    assert finding.code == "DDP703" and "core dump" in finding.remedy


def test_a_peer_that_the_launcher_ended_in_the_midst_of_it_says_where_it_was() -> None:
    stacks = (terminated(0, IN_BACKWARD), stack(1, IN_THE_CALL))
    alone = job()
    alone.call(1, "all_reduce", 1_900.0, 0, size_bytes=4, site=CALL)
    (finding,) = found(alone, died(0), died(1, number=signal.SIGABRT), steps=(5, 5), stacks=stacks)
    assert (finding.code, finding.title) == (
        "DDP301",
        "rank 1 died inside all_reduce (4 bytes) at train.py:24, while rank 0 was in backward at train.py:21 and has "
        "not called it",
    )
    (finding,) = found(alone, died(0), died(1, number=signal.SIGKILL), steps=(5, 5), stacks=stacks[:1])
    assert (finding.code, finding.ranks) == ("DDP703", (1,)), "somebody killed it"


def test_a_rank_that_crashed_just_now_is_not_called_killed_before_its_peers_have_told() -> None:
    alone = job()
    alone.call(1, "all_reduce", 1_900.0, 0, size_bytes=4, site=CALL)
    record = alone.record()
    crashed = Rank(rank=1, end="signalled", signal=signal.SIGABRT, ended_ns=record.job.ended_ns - SECOND_NS, pid=42)
    running = Rank(rank=0, end="running")
    before = msgspec.structs.replace(crashed, ended_ns=record.job.ended_ns - 3 * SECOND_NS)
    told = [may_yet_be_known(alone.record(ranks=(running, rank)), rank) for rank in (crashed, before)]
    assert told == [True, False]
    (finding,) = found(alone, running, crashed, steps=(5, 5))
    assert finding.code == "DDP703", "at the end it is told at once"


def test_of_ranks_that_vanish_at_once_the_one_that_no_sigterm_ended_was_killed() -> None:
    at_work = (SITES[BACKWARD].frames[0],)
    ended = (terminated(0, at_work),)
    (finding,) = found(job(), died(0), died(1), steps=(5, 5), stacks=ended)
    assert (finding.code, finding.ranks) == ("DDP703", (1,))
    assert found(job(), died(0), died(1), steps=(5, 5)) == [], "of which nothing is known"
    assert found(job(), died(0), died(1), steps=(5, 5), stacks=(*ended, terminated(1, at_work))) == []


def test_a_call_in_which_the_launcher_ended_a_peer_is_named_beside_the_rank_that_died() -> None:
    alone = job()
    alone.call(1, "all_reduce", 1_900.0, 0, size_bytes=8_000_000, site=CALL)
    stacks = (stack(0, IN_BACKWARD), terminated(1, IN_THE_CALL))
    (finding,) = found(alone, died(0, number=signal.SIGABRT), died(1), steps=(5, 5), stacks=stacks)
    assert finding.title == (
        "rank 0 died in backward at train.py:21, while rank 1 was inside all_reduce (8.0 MB) at train.py:24, which "
        "rank 0 has not called"
    )


def test_one_line_with_other_sizes_is_a_mismatch() -> None:
    uneven = job()
    uneven.call(0, "all_reduce", 1_900.0, 2_000.0, size_bytes=400, site=CALL)
    uneven.call(1, "all_reduce", 1_900.0, 0, size_bytes=600, site=CALL)
    (finding,) = found(uneven, lost_the_others(0, CALL, backward=False), died(1), steps=(5, 5))
    assert finding.code == "DDP304"
    assert finding.title == (
        "rank 1 died inside all_reduce (600 bytes) at train.py:24, while rank 0 was inside all_reduce (400 bytes) at "
        "train.py:24"
    )


@pytest.mark.parametrize(
    ("number", "advice", "not_advice"), [(None, "what ended that process", "dmesg"), (9, "dmesg", "x")]
)
def test_a_rank_killed_in_a_call_that_fits_was_killed(number: int | None, advice: str, not_advice: str) -> None:
    matching = job()
    for rank, left in ((0, 2_000.0), (1, 0.0)):
        matching.call(rank, "all_reduce", 1_900.0, left, size_bytes=400, site=CALL)
    echo = lost_the_others(0, CALL, backward=False)
    (finding,) = found(matching, echo, died(1, number=number), steps=(5, 5))
    assert finding.code == "DDP703"
    assert advice in finding.remedy and not_advice not in finding.remedy
    assert finding.evidence[0].text == "rank 1 was inside all_reduce at train.py:24, step 5"


def test_a_call_that_was_over_for_another_rank_may_have_been_over_for_the_dead_one() -> None:
    late = job()
    for rank, left in ((0, 1_901.0), (1, 0.0)):
        late.call(rank, "all_reduce", 1_900.0, left, size_bytes=400, site=CALL)
    (finding,) = found(late, lost_the_others(0), died(1), steps=(6, 5))
    assert finding.code == "DDP703" and "dmesg" in finding.remedy


def test_what_ended_for_another_reason_is_no_divergence() -> None:
    alone = job()
    alone.call(1, "all_reduce", 1_900.0, 0, size_bytes=4, site=CALL)
    by_launcher = died(0, number=signal.SIGTERM)
    assert [entry.code for entry in found(alone, by_launcher, died(1, number=9), steps=(6, 5))] == ["DDP703"]
    raised = RankException(time_ns=1, type="KeyError", message="'label'", frames=SITES[OTHER_CALL].frames)
    failed = Rank(rank=0, end="raised", exceptions=(raised,))
    assert [entry.code for entry in found(alone, failed, died(1), steps=(6, 5))] == ["DDP706"]
    teardown = msgspec.structs.replace(died(1, number=signal.SIGABRT), main_finished=True)
    assert found(alone, lost_the_others(0), teardown, steps=(6, 5)) == []


def test_a_call_that_outlasted_its_group_timed_out() -> None:
    alone = job()
    alone.groups = [msgspec.structs.replace(group, timeout_ns=100 * MILLISECOND_NS) for group in alone.groups]
    alone.call(1, "all_reduce", 1_500.0, 0, size_bytes=4, site=CALL)
    assert [entry.code for entry in found(alone, lost_the_others(0), died(1, number=6), steps=(6, 5))] == ["DDP703"]


def test_a_rank_of_three_is_named_by_the_others() -> None:
    alone = job(3)
    alone.call(1, "all_reduce", 1_900.0, 0, size_bytes=4, site=CALL)
    ranks = (lost_the_others(0), died(1), lost_the_others(2))
    (finding,) = found(alone, *ranks, steps=(6, 5, 6))
    assert finding.ranks == (1,)
    assert finding.title.endswith("while ranks 0 and 2 were in backward at train.py:21 and have not called it")
    usual = job()
    for rank in usual.ranks:
        usual.call(rank, "all_reduce", 1_800.0, 1_801.0, size_bytes=4, site=CALL)
    usual.call(1, "all_reduce", 1_900.0, 0, size_bytes=4, site=CALL)
    (finding,) = found(usual, lost_the_others(0), died(1), steps=(6, 5))
    assert finding.ranks == (0,)
