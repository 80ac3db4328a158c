from __future__ import annotations

from typing import Any

import pytest

from ddpdoctor.diagnosis.divergence import describe
from ddpdoctor.diagnosis.divergence.divergence import Divergence, find_divergence
from ddpdoctor.diagnosis.divergence_kind import classify
from ddpdoctor.finding import Frame
from ddpdoctor.record.model import RunRecord, Wrap
from ddpdoctor.record.streams.measured import RankHeartbeat
from ddpdoctor.record.streams.setup import StackDump
from ddpdoctor.record.streams.training import Loader, MissingGradient, Pass
from tests.diagnosis.jobs import SCRIPT, JobBuilder, healthy_job


def diagnose(record: RunRecord) -> tuple[Divergence, str]:
    divergence = find_divergence(record)
    assert divergence is not None
    return divergence, classify(divergence, record)


def test_a_healthy_job_has_no_divergence() -> None:
    job = healthy_job(4)
    for rank in job.ranks:
        job.leave(rank, "finished", main_finished=True)
    assert find_divergence(job.record()) is None


def test_an_extra_collective_on_one_rank_is_rank_divergent() -> None:
    job = healthy_job()
    job.call(0, "all_reduce", 57, 1, reduce_op="sum")
    job.call(1, "broadcast", 40, 64, origin="ddp-forward", root=0)
    job.wait_in_last(0, 1)
    stack = (Frame("/torch/distributed.py", 7, "all_reduce"), Frame(SCRIPT, 57, "train"))
    divergence, trouble = diagnose(job.record(stacks=(StackDump(rank=0, thread="Main", main=True, frames=stack),)))
    assert trouble == "rank-branch"
    assert divergence.form == "mismatch"
    assert divergence.last_common is not None
    assert divergence.last_common.line == Frame(SCRIPT, 60, "train")
    assert [turn.line.line for turn in divergence.turns if turn.line] == [57, 40]
    assert divergence.turns[0].stack == stack
    assert divergence.culprit == 0
    assert describe.title(divergence) == (
        "rank 0 waits in all_reduce at train.py:57, which rank 1 has not called; "
        "rank 1 waits in broadcast (DDP forward) at train.py:40"
    )


def test_with_two_ranks_and_no_history_nobody_is_blamed() -> None:
    job = JobBuilder(2)
    job.call(job.ranks, "barrier", 10)
    job.call(0, "all_reduce", 20)
    job.call(1, "broadcast", 30, root=0)
    divergence, trouble = diagnose(job.record())
    assert (trouble, divergence.culprit) == ("rank-branch", None)
    assert describe.title(divergence) == (
        "the ranks diverge: rank 0 calls all_reduce at train.py:20; rank 1 calls broadcast at train.py:30"
    )
    assert describe.ranks(divergence) == (0, 1)


def test_a_rank_that_skips_what_both_did_before_is_blamed() -> None:
    job = JobBuilder(2)
    for _ in range(3):
        job.call(job.ranks, "all_reduce", 10)
        job.call(job.ranks, "all_reduce", 20, 5)
        job.call(job.ranks, "broadcast", 30, root=0)
    job.call(job.ranks, "all_reduce", 10)
    job.call(0, "all_reduce", 20, 5)
    job.call(1, "broadcast", 30, root=0)
    divergence, _ = diagnose(job.record())
    assert divergence.culprit == 1


def test_a_majority_of_three_names_the_rank_that_differs() -> None:
    job = healthy_job(4)
    job.call((0, 1, 3), "all_reduce", 57)
    job.call(2, "barrier", 80)
    divergence, trouble = diagnose(job.record())
    assert (trouble, divergence.culprit, divergence.culprit_reason) == ("rank-branch", 2, "the other 3 ranks agree")


def test_the_parting_is_walked_back_to_the_first_of_the_differing_lines() -> None:
    """Rank 0 validates alone: its broadcast happens to fit the others' training forward; the hang comes later."""
    job = healthy_job()
    job.call(0, "broadcast", 80, 64, 45, origin="ddp-forward", root=0)
    job.call(1, "broadcast", 40, 64, origin="ddp-forward", root=0)
    job.call(0, "barrier", 90)
    job.reduce_gradients(1)
    divergence, trouble = diagnose(job.record())
    assert trouble == "rank-branch"
    assert [turn.line.line for turn in divergence.turns if turn.line] == [80, 40]
    assert [turn.line.line for turn in divergence.proof if turn.line] == [90, 50]
    assert {location.line for location in describe.locations(divergence)} == {80, 40, 90, 50}


def test_a_pairing_of_lines_that_was_legal_before_is_not_blamed() -> None:
    job = JobBuilder(2)
    for _ in range(2):
        job.call(0, "broadcast", 10, root=0)
        job.call(1, "broadcast", 12, root=0)
        job.call(job.ranks, "barrier", 20)
    job.call(0, "broadcast", 10, root=0)
    job.call(1, "broadcast", 12, root=0)
    job.call(0, "all_reduce", 30)
    job.call(1, "barrier", 20)
    divergence, _ = diagnose(job.record())
    assert [turn.line.line for turn in divergence.turns if turn.line] == [30, 20]


def test_one_line_with_different_sizes_is_a_mismatch() -> None:
    job = healthy_job(3)
    job.call((0, 1), "all_reduce", 57, 1_000)
    job.call(2, "all_reduce", 57, 500)
    divergence, trouble = diagnose(job.record())
    assert (trouble, divergence.culprit) == ("mismatch", 2)
    assert describe.title(divergence) == (
        "all_reduce at train.py:57 differs in the number of elements: 1,000 elements on ranks 0 and 1, "
        "500 elements on rank 2"
    )


def test_different_reduce_operations_are_a_mismatch_although_nothing_hangs() -> None:
    job = healthy_job()
    job.call(0, "all_reduce", 57, reduce_op="sum")
    job.call(1, "all_reduce", 57, reduce_op="max")
    job.call(job.ranks, "barrier", 60)
    for rank in job.ranks:
        job.leave(rank, "finished", main_finished=True)
    divergence, trouble = diagnose(job.record())
    assert (trouble, divergence.difference) == ("mismatch", "reduce operation")


def desynchronised() -> JobBuilder:
    """Rank 1 skips the backward of step 3."""
    job = JobBuilder(2)
    for step in (1, 2):
        job.step(job.ranks, step)
        job.reduce_gradients(job.ranks)
    job.step(0, 3)
    job.reduce_gradients(0)
    job.step(1, 4)
    job.reduce_gradients(1)
    return job


def test_gradients_of_different_steps_are_a_silent_desync() -> None:
    job = desynchronised()
    divergence, trouble = diagnose(job.record())
    assert (trouble, divergence.culprit) == ("desync", 1)
    assert describe.title(divergence) == (
        "gradients of different steps are averaged in all_reduce (DDP backward) at train.py:50: step 3 of rank 0 with "
        "step 4 of rank 1, since rank 1 skipped a backward"
    )


def test_a_forward_that_broadcast_before_the_skipped_backward_hides_nothing() -> None:
    job = JobBuilder(2)
    job.step(job.ranks, 1)
    job.reduce_gradients(job.ranks)
    job.step(job.ranks, 2)
    job.call(job.ranks, "broadcast", 40, 8, origin="ddp-forward", root=0)
    job.reduce_gradients(0)
    job.step(1, 3)
    job.reduce_gradients(1)
    divergence, trouble = diagnose(job.record())
    assert (trouble, divergence.culprit) == ("desync", 1)


def test_an_extra_forward_and_backward_that_were_paired_with_the_next_step_are_the_cause_of_the_drift() -> None:
    job = JobBuilder(2)
    for step in (1, 2, 3):
        job.step(job.ranks, step)
        job.call(job.ranks, "broadcast", 40, 8, origin="ddp-forward", root=0)
        job.reduce_gradients(job.ranks)
    job.step(0, 1, line=12)
    job.call(0, "broadcast", 12, 8, origin="ddp-forward", root=0)
    job.reduce_gradients(0, line=13)
    for rank, steps in ((0, (4, 5)), (1, (4, 5, 6))):
        for step in steps:
            job.step(rank, step)
            job.call(rank, "broadcast", 40, 8, origin="ddp-forward", root=0)
            job.reduce_gradients(rank)
    divergence, trouble = diagnose(job.record())
    assert (trouble, divergence.form, divergence.culprit) == ("rank-branch", "mismatch", 0)
    assert [turn.line and turn.line.line for turn in divergence.turns] == [12, 40]
    assert [turn.line and turn.line.line for turn in divergence.proof] == [50, 50]


def test_the_hang_at_the_end_of_a_desynchronised_job_is_no_second_cause() -> None:
    job = desynchronised()
    job.step(0, 4)
    job.reduce_gradients(0)
    job.wait_in_last(0)
    job.leave(1, "finished", main_finished=True)
    divergence, trouble = diagnose(job.record())
    assert (trouble, divergence.turns[0].step) == ("desync", 3)


def test_two_lines_paired_crosswise_are_told_as_a_silent_desync() -> None:
    job = healthy_job()
    job.call(0, "all_reduce", 70)
    job.call(0, "all_reduce", 71)
    job.call(1, "all_reduce", 71)
    job.call(1, "all_reduce", 70)
    divergence, trouble = diagnose(job.record())
    assert (trouble, divergence.form) == ("desync", "crossed")
    assert describe.title(divergence) == (
        "all_reduce at train.py:70 on rank 0 is paired with all_reduce at train.py:71 on rank 1, "
        "and the other way round"
    )


def test_branches_that_reduce_the_same_quantity_in_different_steps_are_legal() -> None:
    job = healthy_job()
    for step, (one, other) in enumerate([(70, 71), (71, 70)], start=4):
        job.step(job.ranks, step)
        job.call(0, "all_reduce", one)
        job.call(1, "all_reduce", other)
    assert find_divergence(job.record()) is None


def test_a_different_line_for_one_entry_alone_is_legal() -> None:
    job = healthy_job()
    job.call(0, "broadcast", 70, root=0)
    job.call(1, "broadcast", 72, root=0)
    job.call(job.ranks, "barrier", 80)
    assert find_divergence(job.record()) is None


def test_a_rank_that_exits_while_another_waits_left_early() -> None:
    job = healthy_job()
    job.leave(1, "left-by-exit", exit_code=1)
    job.reduce_gradients(0)
    job.wait_in_last(0)
    divergence, trouble = diagnose(job.record())
    assert (trouble, divergence.culprit) == ("early-exit", 1)
    assert describe.title(divergence) == (
        "rank 1 left with exit code 1 while rank 0 waits in all_reduce (DDP backward) at train.py:50"
    )


def test_a_rank_that_is_killed_left_early_although_the_others_then_die_too() -> None:
    job = healthy_job(3)
    job.leave(2, "signalled", signal=11)
    for rank in (0, 1):
        job.reduce_gradients(rank)
        job.columns[rank]["completed_ns"][-1] = 0
        job.leave(rank, "signalled", signal=15)
    divergence, trouble = diagnose(job.record())
    assert (trouble, divergence.culprit) == ("early-exit", 2)
    assert "rank 2 was killed by SIGSEGV" in describe.title(divergence)


def test_a_rank_killed_for_its_memory_left_early_although_the_launcher_ends_the_other() -> None:
    job = healthy_job()
    job.leave(1, "signalled", signal=9)
    job.reduce_gradients(0)
    job.columns[0]["completed_ns"][-1] = 0
    job.leave(0, "signalled", signal=15)
    divergence, trouble = diagnose(job.record())
    assert (trouble, divergence.culprit) == ("early-exit", 1)


@pytest.mark.parametrize(("end", "details"), [("signalled", {"signal": 9}), ("left-by-exit", {"exit_code": 3})])
def test_a_rank_that_died_is_named_although_the_launcher_ended_the_other_before_it_waited(
    end: Any, details: dict[str, Any]
) -> None:
    job = healthy_job()
    job.leave(0, "signalled", signal=15)
    job.leave(1, end, **details)
    divergence, trouble = diagnose(job.record())
    assert (trouble, divergence.culprit) == ("early-exit", 1)
    assert describe.title(divergence).startswith(("rank 1 was killed by SIGKILL", "rank 1 left with exit code 3"))


def test_a_rank_that_died_in_a_collective_that_it_had_entered_is_named_by_what_the_other_lost() -> None:
    job = healthy_job()
    job.reduce_gradients(job.ranks)
    job.leave(1, "signalled", signal=9)
    job.fail(0, "RuntimeError", 50, "Connection closed by peer", communication=True)
    divergence, trouble = diagnose(job.record())
    assert (trouble, divergence.culprit) == ("early-exit", 1)


def test_all_ranks_terminated_together_are_no_divergence() -> None:
    job = healthy_job()
    job.reduce_gradients(0)
    job.columns[0]["completed_ns"][-1] = 0
    for rank in job.ranks:
        job.leave(rank, "signalled", signal=15)
    assert find_divergence(job.record()) is None


def test_the_first_exception_is_the_root_and_its_echo_is_not() -> None:
    job = healthy_job()
    job.reduce_gradients(0)
    job.fail(1, "KeyError", 33, "'label'")
    job.fail(0, "RuntimeError", 50, "Connection closed by peer", communication=True)
    divergence, trouble = diagnose(job.record())
    assert (trouble, divergence.culprit) == ("exception", 1)
    assert describe.title(divergence) == (
        "rank 1 raised KeyError: 'label' at train.py:33 while rank 0 waits in all_reduce (DDP backward) at train.py:50"
    )
    assert describe.locations(divergence)[0].line == 33


def test_an_exception_before_any_collective_of_that_rank_is_found() -> None:
    job = JobBuilder(2)
    job.fail(1, "ValueError", 12)
    job.wait_in_store("init_process_group", 20, 0)
    divergence, trouble = diagnose(job.record())
    assert (trouble, divergence.culprit) == ("exception", 1)
    assert describe.title(divergence) == (
        "rank 1 raised ValueError: bad at train.py:12 while rank 0 waits in init_process_group at train.py:20"
    )


def test_an_exception_that_all_ranks_raise_alike_is_a_plain_bug() -> None:
    job = healthy_job()
    for rank in job.ranks:
        job.fail(rank, "FileNotFoundError", 12, f"data_{rank}.bin")
    assert find_divergence(job.record()) is None


def test_a_lone_exception_of_a_rank_that_nobody_outran_says_nothing() -> None:
    """The launcher terminates the second rank before it can raise the same."""
    job = healthy_job()
    job.fail(0, "FileNotFoundError", 12)
    job.leave(1, "signalled", signal=15)
    assert find_divergence(job.record()) is None


def test_an_exception_after_our_own_ending_is_no_evidence() -> None:
    job = healthy_job()
    job.leave(0, "ended-by-rehearsal")
    job.reduce_gradients(1)
    job.fail(1, "RuntimeError", 50, "something odd")
    assert find_divergence(job.record()) is None


def test_the_error_of_ddp_about_unused_parameters_is_no_second_finding() -> None:
    job = healthy_job()
    job.reduce_gradients(0)
    job.wait_in_last(0)
    job.fail(1, "RuntimeError", 40, "Expected to have finished reduction in the prior iteration before starting a new")
    wraps = tuple(Wrap(rank=rank, wrap=0) for rank in job.ranks)
    missing = (MissingGradient(rank=1, wrap=0, parameters=("head.weight",)),)
    assert find_divergence(job.record(wraps=wraps, missing_gradients=missing)) is None
    assert find_divergence(job.record()) is not None


def test_a_bucket_that_only_one_rank_reduces_is_explained_by_the_missing_gradient() -> None:
    job = healthy_job()
    job.reduce_gradients(0)
    job.call(1, "all_reduce", 60, reduce_op="sum")
    wraps = tuple(Wrap(rank=rank, wrap=0) for rank in job.ranks)
    missing = (MissingGradient(rank=1, wrap=0, parameters=("head.weight",)),)
    assert find_divergence(job.record(wraps=wraps, missing_gradients=missing)) is None


def test_the_rank_that_ran_out_of_batches_makes_it_uneven_inputs() -> None:
    job = healthy_job()
    job.leave(1, "finished", main_finished=True)
    job.reduce_gradients(0)
    job.wait_in_last(0)
    site = job.site(20)
    loaders = tuple(Loader(rank=rank, loader=0, site=site) for rank in job.ranks)
    passes = (
        Pass(rank=0, loader=0, ordinal=0, true_length=4, yielded=4, backwards=4),
        Pass(rank=1, loader=0, ordinal=0, true_length=3, yielded=3, end="exhausted", backwards=3),
    )
    wraps = tuple(Wrap(rank=rank, wrap=0) for rank in job.ranks)
    _, trouble = diagnose(job.record(loaders=loaders, passes=passes, wraps=wraps))
    assert trouble == "uneven-passes"


def test_ranks_that_wait_in_different_groups_for_each_other_stand_still() -> None:
    job = JobBuilder(2)
    one, other = job.group(0, 1), job.group(0, 1)
    job.call(0, "all_reduce", 10, group=one)
    job.call(1, "all_reduce", 20, group=other)
    job.wait_in_last(0, 1)
    job.tick(2_000)
    divergence, trouble = diagnose(job.record())
    assert (trouble, divergence.form, divergence.culprit) == ("rank-branch", "standstill", None)
    assert describe.title(divergence) == (
        "the ranks wait for each other: rank 0 waits in all_reduce at train.py:10; "
        "rank 1 waits in all_reduce at train.py:20"
    )


def test_a_group_made_on_some_ranks_only_stands_still() -> None:
    job = JobBuilder(2)
    job.wait_in_store("new_group", 10, 0, 0)
    job.call(1, "barrier", 20)
    job.wait_in_last(1)
    job.tick(2_000)
    divergence, trouble = diagnose(job.record())
    assert (trouble, divergence.form) == ("subset-group", "standstill")
    job.of_rank[0]["stuck"] = True  # In the store a rank does nothing, and is no culprit for that.
    divergence, trouble = diagnose(job.record())
    assert (trouble, divergence.form) == ("subset-group", "standstill")


def test_a_stuck_rank_is_a_hang_and_a_busy_one_is_not() -> None:
    job = healthy_job(3)
    for rank in (0, 2):
        job.call(rank, "barrier", 70)
        job.wait_in_last(rank)
    job.tick(6_000)
    stack = (Frame("/lib/filelock.py", 9, "acquire"), Frame(SCRIPT, 66, "tokenise"), Frame(SCRIPT, 90, "main"))
    stacks = (StackDump(rank=1, thread="Main", main=True, frames=stack),)
    assert find_divergence(job.record(stacks=stacks)) is None
    job.of_rank[1]["stuck"] = True
    divergence, trouble = diagnose(job.record(stacks=stacks))
    assert (trouble, divergence.culprit, divergence.form) == ("hang", 1, "stuck")
    assert describe.title(divergence) == (
        "rank 1 is stuck at train.py:66 while ranks 0 and 2 wait in barrier at train.py:70"
    )


def test_a_collective_that_all_have_entered_is_not_a_standstill() -> None:
    job = healthy_job()
    job.call(job.ranks, "all_reduce", 70, 10_000_000)
    job.wait_in_last(0, 1)
    job.tick(60_000)
    assert find_divergence(job.record()) is None


def test_facts_tell_each_rank_with_its_line_and_stack() -> None:
    job = healthy_job()
    job.call(0, "all_reduce", 57, 1, 99, reduce_op="sum")
    job.call(1, "broadcast", 40, 64, origin="ddp-forward", root=0)
    divergence, _ = diagnose(job.record())
    facts = describe.facts(divergence, "rehearsal")
    assert [fact.rank for fact in facts] == [None, 0, 1, None, 0]
    assert facts[1].stack == (Frame(SCRIPT, 57, "train"), Frame(SCRIPT, 99, "main"))
    assert facts[1].text == "rank 0 calls all_reduce at train.py:57 (1 element, float32, sum) in step 3"


def test_a_stack_that_was_taken_elsewhere_is_not_shown_as_that_of_the_call() -> None:
    job = JobBuilder(2)
    job.call(0, "all_gather", 57, 3)
    job.call(1, "all_gather", 57, 2)
    teardown = (Frame("<frozen posixpath>", 451, "_joinrealpath"), Frame("/lib/weakref.py", 666, "_exitfunc"))
    inside = (Frame("/torch/distributed.py", 7, "all_gather"), Frame(SCRIPT, 57, "train"), Frame(SCRIPT, 99, "main"))
    stacks = (
        StackDump(rank=0, thread="Main", main=True, frames=teardown),
        StackDump(rank=1, thread="Main", main=True, frames=inside),
    )
    facts = describe.facts(diagnose(job.record(stacks=stacks))[0], "rehearsal")
    chains = {fact.rank: fact.stack for fact in facts if fact.stack}
    assert chains == {0: (Frame(SCRIPT, 57, "train"),), 1: inside}


def test_a_thousand_ranks_share_their_facts() -> None:
    job = JobBuilder(1_000)
    job.call(job.ranks, "barrier", 10)
    job.call(range(1, 1_000), "all_reduce", 20)
    job.call(0, "broadcast", 30, root=0)
    divergence, _ = diagnose(job.record())
    assert divergence.culprit == 0
    assert len(describe.facts(divergence, "rehearsal")) == 5
    assert "ranks 1-999 call all_reduce" in describe.title(divergence)


def test_the_divergence_of_a_record_is_found_once() -> None:
    job = JobBuilder(2)
    job.fail(1, "ValueError", 12)
    job.wait_in_store("init_process_group", 20, 0)
    record = job.record()
    assert find_divergence(record) is find_divergence(record)


@pytest.mark.parametrize("thrown_out", [False, True])
def test_a_backward_left_out_shows_in_the_counts_at_the_end(thrown_out: bool) -> None:
    """Gloo tells who waits, within a second or so, that its peer has left: its backward counts as made then."""
    job = JobBuilder(2, kind="run")
    for step in (1, 2):
        job.step(job.ranks, step)
        job.reduce_gradients(job.ranks)
    job.step(0, 3)
    job.reduce_gradients(0)
    job.wait_in_last(0)
    job.leave(1, "finished", main_finished=True)
    if thrown_out:
        job.fail(0, "RuntimeError", 50, "Connection closed by peer", communication=True)
    counts = {0: 3 if thrown_out else 2, 1: 2}
    beats = tuple(RankHeartbeat(rank=rank, beat_at_ns=1, forwards=3, backwards=made) for rank, made in counts.items())
    wraps = tuple(Wrap(rank=rank, wrap=0, ranks=(0, 1)) for rank in job.ranks)
    divergence, trouble = diagnose(job.record(heartbeats=beats, wraps=wraps))
    assert (divergence.form, trouble) == ("absentee", "desync")
