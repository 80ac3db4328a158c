from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ddpdoctor.checks.collectives.hang import of_world
from ddpdoctor.diagnosis.divergence.describe import title
from ddpdoctor.diagnosis.divergence.divergence import Divergence, find_divergence
from ddpdoctor.diagnosis.divergence.matching import Matcher
from ddpdoctor.diagnosis.divergence.waiting import blocked_ranks
from ddpdoctor.diagnosis.live_verdict import VerdictMemory, live_verdict
from ddpdoctor.finding import Frame
from ddpdoctor.record.streams.collectives import Wait
from ddpdoctor.record.streams.measured import RankHeartbeat
from ddpdoctor.record.streams.setup import StackDump
from tests.diagnosis.jobs import SCRIPT, JobBuilder, healthy_job


def look(memory: VerdictMemory, job: JobBuilder, milliseconds: int = 100) -> Divergence | None:
    """Let time pass and look at the job as the supervisor does."""
    return live_verdict(memory, job.record(), job.tick(milliseconds))


def look_for(memory: VerdictMemory, job: JobBuilder, seconds: float) -> Divergence | None:
    """Look ten times a second until there is a verdict or the time is over."""
    for _ in range(int(seconds * 10)):
        found = look(memory, job)
        if found is not None:
            return found
    return None


def test_a_mismatch_is_a_proof_at_the_first_look() -> None:
    memory, job = VerdictMemory(), healthy_job()
    assert look(memory, job) is None
    job.call(0, "all_reduce", 57)
    assert look(memory, job) is None
    job.call(1, "barrier", 60, completed=False)
    found = look(memory, job)
    assert found is not None
    assert found.form == "mismatch"


def test_of_three_ranks_the_last_to_come_may_say_which_other_is_wrong() -> None:
    for comes in (True, False):
        memory, job = VerdictMemory(), healthy_job(3)
        if comes:
            job.call(0, "all_reduce", 57, completed=False)
        job.call(1, "all_reduce", 57, completed=False)
        job.call(2, "barrier", 57, completed=False)
        assert (look(memory, job) is not None) == comes
        job.call(0, "all_reduce", 57, completed=False)
        assert look_for(memory, job, 0.5) is not None
        found = find_divergence(job.record())
        assert found is not None
        assert found.culprit == 2


def test_in_a_live_run_a_mismatch_waits_until_a_rank_says_that_it_waits() -> None:
    """The calls are written before the places, and what code a mismatch has depends on both."""
    for waits in (True, False):
        job, memory = healthy_job(), VerdictMemory()
        job.job["kind"] = "run"
        job.call(0, "all_reduce", 57, completed=False)
        job.call(1, "broadcast", 40, root=0, completed=False)
        assert look(memory, job) is None
        if waits:
            job.wait_in_last(0)
        found = look(memory, job)
        assert (found is not None) == waits
        assert look_for(memory, job, 0.5) is not None


def test_a_desync_is_a_proof_at_the_first_look() -> None:
    memory, job = VerdictMemory(), JobBuilder(2)
    for step in (1, 2):
        job.step(job.ranks, step)
        job.reduce_gradients(job.ranks)
        assert look(memory, job) is None
    job.step(0, 3)
    job.reduce_gradients(0)
    job.step(1, 4)
    job.reduce_gradients(1)
    found = look(memory, job)
    assert found is not None
    assert (found.form, found.culprit) == ("desync", 1)


def test_a_rank_that_works_while_another_waits_proves_nothing() -> None:
    memory, job = VerdictMemory(), healthy_job()
    job.call(0, "barrier", 70)
    job.wait_in_last(0)
    assert look_for(memory, job, 60) is None


def test_an_incomplete_collective_is_not_waiting() -> None:
    memory, job = VerdictMemory(), healthy_job()
    job.call(0, "all_reduce", 70, completed=False)
    job.leave(1, "finished", main_finished=True)
    assert look_for(memory, job, 5) is None


def test_a_rank_that_left_while_another_waits_is_believed_after_a_moment() -> None:
    memory, job = VerdictMemory(), healthy_job()
    job.call(0, "barrier", 70)
    job.wait_in_last(0)
    job.leave(1, "left-by-exit", exit_code=3)
    assert look(memory, job) is None
    found = look_for(memory, job, 1)
    assert found is not None
    assert (found.form, found.culprit) == ("absentee", 1)


def test_a_wait_that_ends_before_it_is_believed_is_forgotten() -> None:
    memory, job = VerdictMemory(), healthy_job()
    job.call(0, "barrier", 70)
    job.wait_in_last(0)
    job.leave(1, "finished", main_finished=True)
    assert look(memory, job) is None
    del job.of_rank[0]["waiting_in"]
    assert look_for(memory, job, 5) is None


def test_the_normal_end_of_a_job_rank_by_rank_proves_nothing() -> None:
    memory, job = VerdictMemory(), healthy_job(3)
    for rank in job.ranks:
        job.leave(rank, "finished", main_finished=True)
        assert look_for(memory, job, 1) is None


def test_a_rank_that_was_ended_by_us_proves_nothing() -> None:
    memory, job = VerdictMemory(), healthy_job()
    job.leave(1, "ended-by-rehearsal")
    job.reduce_gradients(0)
    job.wait_in_last(0)
    assert look_for(memory, job, 5) is None


def test_a_rank_that_raised_while_nobody_waits_yet_proves_nothing() -> None:
    memory, job = VerdictMemory(), healthy_job()
    job.reduce_gradients(0)
    job.fail(1, "KeyError", 33)
    assert look_for(memory, job, 5) is None
    job.wait_in_last(0)
    found = look_for(memory, job, 1)
    assert found is not None
    assert (found.form, found.culprit) == ("absentee", 1)


def test_a_standstill_is_believed_after_a_second() -> None:
    memory, job = VerdictMemory(), JobBuilder(2)
    one, other = job.group(0, 1), job.group(0, 1)
    job.call(0, "all_reduce", 10, group=one)
    job.call(1, "all_reduce", 20, group=other)
    job.wait_in_last(0, 1)
    assert look_for(memory, job, 0.8) is None
    found = look_for(memory, job, 1)
    assert found is not None
    assert found.form == "standstill"


def test_a_ring_of_ranks_with_one_that_works_is_no_standstill() -> None:
    memory, job = VerdictMemory(), JobBuilder(3)
    one, other = job.group(0, 1), job.group(1, 2)
    job.call(0, "all_reduce", 10, group=one)
    job.call(1, "all_reduce", 20, group=other)
    job.wait_in_last(0, 1)
    assert look_for(memory, job, 10) is None


def test_a_stuck_rank_is_a_verdict_while_others_wait_for_it() -> None:
    memory, job = VerdictMemory(), healthy_job()
    job.of_rank[1]["stuck"] = True
    assert look_for(memory, job, 2) is None
    job.call(0, "barrier", 70)
    job.wait_in_last(0)
    found = look_for(memory, job, 2)
    assert found is not None
    assert (found.form, found.culprit) == ("stuck", 1)


def test_a_rank_that_stands_in_a_collective_which_all_have_reached_is_the_one_that_is_stuck() -> None:
    memory, job = VerdictMemory(), healthy_job()
    job.call((0, 1), "all_reduce", 60, completed=False)
    job.call(0, "barrier", 70)
    job.wait_in_last(0, 1)
    job.of_rank[1] |= {"stuck": True, "stopped": True}
    found = look_for(memory, job, 2)
    assert found is not None
    assert (found.form, found.culprit) == ("stuck", 1)
    assert title(found).startswith("rank 1 is stopped"), title(found)


def test_a_rank_whose_exit_handler_stands_keeps_its_process() -> None:
    handler, module = Frame(SCRIPT, 12, "upload"), Frame(SCRIPT, 90, "<module>")
    keeps = "the script of rank 1 is over, but its exit handler `upload` at train.py:12 keeps the process"
    stands = "rank 1 is stuck at train.py:12; rank 0 ran to its end and left"
    for frames, said in (((handler,), keeps), ((handler, module), stands)):
        job = _standing_job({1: frames})
        job.leave(0, "finished", main_finished=True)
        found = look_for(VerdictMemory(), job, 2)
        assert found is not None and (found.form, found.culprit) == ("stuck", 1)
        assert title(found) == said


def test_ranks_that_all_stand_outside_of_collectives_hang() -> None:
    read = Frame(SCRIPT, 10, "load"), Frame(SCRIPT, 90, "<module>")
    found = look_for(VerdictMemory(), _standing_job({0: read, 1: read}), 2)
    assert found is not None and (found.form, found.culprit) == ("stuck", None)
    assert title(found) == "ranks 0 and 1 are stuck at train.py:10"


def test_ranks_that_stand_in_two_places_are_told_apart() -> None:
    module = Frame(SCRIPT, 90, "<module>")
    stacks = {0: (Frame(SCRIPT, 10, "load"), module), 1: (Frame(SCRIPT, 20, "save"), module)}
    found = look_for(VerdictMemory(), _standing_job(stacks), 2)
    assert found is not None
    assert title(found) == "rank 0 is stuck at train.py:10; rank 1 is stuck at train.py:20"


def test_a_rank_that_waits_in_a_collective_which_is_not_known_yet_is_not_said_to_stand() -> None:
    """On a loaded machine its heartbeat comes before what its flight recorder holds."""
    read = Frame(SCRIPT, 10, "load"), Frame(SCRIPT, 90, "<module>")
    job = _standing_job({0: read, 1: read})
    waits, stands = job.streams["heartbeats"]
    job.streams["heartbeats"] = (msgspec.structs.replace(waits, collective="reduction"), stands)
    assert look_for(VerdictMemory(), job, 2) is None
    job.streams["heartbeats"] = (msgspec.structs.replace(waits, collective="barrier", enqueued=-1), stands)
    assert look_for(VerdictMemory(), job, 2) is not None, "this torch records no collectives"


def test_ranks_that_stand_are_no_hang_while_another_works_or_is_not_seen() -> None:
    read = Frame(SCRIPT, 10, "load")
    assert look_for(VerdictMemory(), _standing_job({0: (read,)}), 2) is None
    unseen = _standing_job({0: (read,), 1: (read,)})
    unseen.job["world_size"] = 4
    assert look_for(VerdictMemory(), unseen, 2) is None


def test_a_rank_that_stands_since_it_destroyed_its_world_is_told_of_the_model() -> None:
    job = _standing_job({1: (Frame(SCRIPT, 90, "<module>"),)})
    job.leave(0, "finished", main_finished=True)
    found = look_for(VerdictMemory(), job, 2)
    assert found is not None
    silent = msgspec.structs.replace(
        found, turns=tuple(msgspec.structs.replace(turn, seen_ago_ns=9 * 10**9) for turn in found.turns)
    )
    wait = Wait(rank=1, kind="destroy_process_group", site=0, started_ns=1, ended_ns=2)
    for waits, told in (((wait,), True), ((msgspec.structs.replace(wait, ended_ns=0),), False), ((), False)):
        record = msgspec.structs.replace(job.record(), waits=waits)
        assert bool(of_world(silent, record)) == told
    assert "del model" in of_world(silent, msgspec.structs.replace(job.record(), waits=(wait,)))
    assert not of_world(found, msgspec.structs.replace(job.record(), waits=(wait,)))


def _standing_job(stacks: Mapping[int, tuple[Frame, ...]]) -> JobBuilder:
    """A job of which some ranks do nothing."""
    job = healthy_job()
    job.job["kind"] = "run"
    for rank in stacks:
        job.of_rank[rank]["stuck"] = True
    job.streams["stacks"] = tuple(
        StackDump(rank=rank, thread="main", main=True, frames=frames, time_ns=job.now_ns)
        for rank, frames in stacks.items()
    )
    job.streams["heartbeats"] = tuple(_heartbeat(rank, job.now_ns) for rank in job.ranks)
    return job


def _heartbeat(rank: int, now_ns: int) -> RankHeartbeat:
    blank: dict[str, Any] = dict.fromkeys(RankHeartbeat.__struct_fields__, 0)
    blank |= {"phase": "other", "collective": "", "site": -1}
    return RankHeartbeat(**{**blank, "rank": rank, "beat_at_ns": now_ns})


def test_ranks_that_stand_are_no_hang_where_nobody_measured_for_how_long() -> None:
    read = Frame(SCRIPT, 10, "load"), Frame(SCRIPT, 90, "<module>")
    rehearsed = _standing_job({0: read, 1: read})
    rehearsed.job["kind"] = "rehearsal"
    assert look_for(VerdictMemory(), rehearsed, 2) is None
    outside = _standing_job({0: read, 1: read})
    del outside.streams["heartbeats"]
    assert look_for(VerdictMemory(), outside, 2) is None


def test_a_collective_that_was_over_before_a_rank_failed_is_not_what_it_failed_in() -> None:
    job = healthy_job()
    job.job["kind"] = "run"
    job.fail(1, "RuntimeError", 50, "Connection reset by peer", communication=True)
    matcher = Matcher()
    matcher.advance(job.record())
    assert blocked_ranks(job.record(), matcher) == {}
