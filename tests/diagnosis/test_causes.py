"""Which cause a divergence is put down to, on records built by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from ddpdoctor.diagnosis.divergence import describe
from ddpdoctor.diagnosis.divergence.divergence import Divergence, find_divergence
from ddpdoctor.diagnosis.divergence.long_waits import longest_wait
from ddpdoctor.diagnosis.divergence_kind import classify, skip_behind
from ddpdoctor.diagnosis.training.pass_lengths import skipped_batches
from ddpdoctor.record.model import Forward, RunRecord, Wrap
from ddpdoctor.record.streams.collectives import Group
from ddpdoctor.record.streams.training import Backward, Loader, Pass
from tests.diagnosis.jobs import JobBuilder, healthy_job

LOADER_LINE, LOOP_LINE = 20, 35


def diagnose(record: RunRecord) -> tuple[Divergence, str]:
    divergence = find_divergence(record)
    assert divergence is not None
    return divergence, classify(divergence, record)


def forwards(job: JobBuilder, rank: int, line: int, **fields: Any) -> Forward:
    return Forward(rank=rank, wrap=0, site=job.site(line), gradients=True, training=True, **fields)


def on_loader(job: JobBuilder, batches: dict[int, Iterable[int]], *, looped: bool = True, end: Any = "cut") -> Any:
    """Streams of a job whose ranks trained on these batches of one pass of four."""
    site, loop = job.site(LOADER_LINE), job.site(LOOP_LINE)
    return {
        "loaders": tuple(Loader(rank=rank, loader=0, site=site) for rank in job.ranks),
        "passes": tuple(Pass(rank=rank, loader=0, ordinal=0, site=loop, yielded=4, end=end) for rank in job.ranks),
        "forwards": tuple(
            forwards(job, rank, 40, pass_loader=0, pass_ordinal=0, batch=batch, looped=looped)
            for rank, own in batches.items()
            for batch in own
        ),
        "wraps": tuple(Wrap(rank=rank, wrap=0) for rank in job.ranks),
    }


def test_ranks_that_receive_from_each_other_stand_still() -> None:
    job = healthy_job()
    job.call(0, "recv", 70, root=1)
    job.call(1, "recv", 70, root=0)
    job.wait_in_last(0, 1)
    job.tick(2_000)
    divergence, trouble = diagnose(job.record())
    assert (trouble, divergence.form, divergence.culprit) == ("hang", "standstill", None)
    assert describe.title(divergence) == (
        "the ranks wait for each other: rank 0 waits in recv from rank 1 at train.py:70; "
        "rank 1 waits in recv from rank 0 at train.py:70"
    )


def test_receives_in_a_ring_stand_still_and_one_sender_ends_that() -> None:
    job = JobBuilder(3)
    for rank in job.ranks:
        job.call(rank, "recv", 70, root=(rank + 1) % 3)
    job.wait_in_last(0, 1, 2)
    job.tick(2_000)
    assert diagnose(job.record())[1] == "hang"
    for column in job.columns[2].values():
        column.pop()
    del job.of_rank[2]["waiting_in"]
    assert find_divergence(job.record()) is None


def test_a_receive_that_was_sent_is_no_wait_and_one_from_any_source_is_none_that_is_known() -> None:
    job = JobBuilder(2)
    job.call(0, "recv", 70, root=1)
    job.call(1, "send", 75, root=0)
    job.call(1, "recv", 76)
    job.wait_in_last(0, 1)
    job.tick(60_000)
    assert find_divergence(job.record()) is None


def test_a_second_receive_needs_a_second_send() -> None:
    job = JobBuilder(2)
    job.call(1, "send", 75, root=0)
    job.call(0, "recv", 70, root=1)
    job.call(0, "recv", 70, root=1)
    job.call(1, "barrier", 80)
    job.wait_in_last(0, 1)
    job.tick(2_000)
    assert diagnose(job.record())[1] == "rank-branch"


def test_one_line_in_two_groups_is_a_mismatch_of_the_group() -> None:
    job = JobBuilder(2)
    job.groups.append(Group(ranks=(0, 1), ordinal=1))
    job.call(0, "all_reduce", 10)
    job.call(1, "all_reduce", 10, group=1)
    job.wait_in_last(0, 1)
    job.tick(2_000)
    divergence, trouble = diagnose(job.record())
    assert (trouble, divergence.difference) == ("mismatch", "group")
    assert describe.title(divergence) == (
        "all_reduce at train.py:10 differs in the group: the default group on rank 0, "
        "the 1st group made of ranks 0 and 1 on rank 1"
    )


def lone_forward(gradients: bool) -> tuple[JobBuilder, tuple[Forward, ...]]:
    """Rank 0 runs the model at line 80 too; both train at line 40."""
    job = healthy_job()
    job.call(0, "broadcast", 80, 64, origin="ddp-forward", root=0)
    seen = [forwards(job, rank, 40) for rank in job.ranks]
    seen.append(msgspec.structs.replace(forwards(job, 0, 80), gradients=gradients, training=False))
    return job, tuple(seen)


def test_a_forward_of_rank_0_alone_is_named_before_the_hang_that_follows() -> None:
    job, seen = lone_forward(gradients=True)
    job.call(1, "broadcast", 40, 64, origin="ddp-forward", root=0)
    job.call(0, "barrier", 90)
    job.reduce_gradients(1)
    divergence, trouble = diagnose(job.record(forwards=seen))
    assert (trouble, divergence.culprit) == ("lone-forward", 0)
    assert diagnose(job.record())[1] == "rank-branch"


def test_a_forward_of_rank_0_that_waits_after_the_others_left_is_no_early_exit() -> None:
    job, seen = lone_forward(gradients=False)
    job.wait_in_last(0)
    job.leave(1, "finished", main_finished=True)
    assert diagnose(job.record(forwards=seen))[1] == "lone-forward"


def test_an_extra_call_before_a_forward_of_all_is_not_put_down_to_the_forward() -> None:
    job = healthy_job()
    job.call(0, "broadcast", 40, 64, origin="ddp-forward", root=0)
    job.call(1, "all_reduce", 57)
    seen = tuple(forwards(job, rank, 40) for rank in job.ranks)
    assert diagnose(job.record(forwards=seen))[1] == "rank-branch"


@pytest.mark.parametrize("trained", [True, False])
def test_ddp_on_some_ranks_is_named_once_the_others_train_without(trained: bool) -> None:
    job = JobBuilder(2)
    job.call(0, "all_gather", 30, origin="ddp-construct")
    job.call(1, "barrier", 60)
    backwards = (Backward(rank=1),) if trained else ()
    assert diagnose(job.record(backwards=backwards))[1] == ("ddp-on-subset" if trained else "rank-branch")


def test_a_second_model_on_one_rank_is_no_ddp_on_a_subset() -> None:
    job = JobBuilder(2)
    job.call(0, "all_gather", 30, origin="ddp-construct")
    job.call(1, "barrier", 60)
    record = job.record(backwards=(Backward(rank=1),), wraps=(Wrap(rank=1, wrap=0),))
    assert diagnose(record)[1] == "rank-branch"


def test_a_rank_that_dies_while_others_build_ddp_is_still_the_one_that_died() -> None:
    job = JobBuilder(2)
    job.call(0, "all_gather", 30, origin="ddp-construct")
    job.wait_in_last(0)
    job.leave(1, "signalled", signal=9)
    assert diagnose(job.record(backwards=(Backward(rank=1),)))[1] == "early-exit"


def test_a_group_that_a_finished_rank_never_made_is_named() -> None:
    job = JobBuilder(2)
    job.wait_in_store("new_group", 10, 0, 0, 1)
    job.leave(1, "finished", main_finished=True)
    assert diagnose(job.record())[1] == "subset-group"


def test_lines_that_both_ranks_ran_before_are_parted_by_the_ranks_own_data() -> None:
    job = JobBuilder(2)
    for _ in range(2):
        job.call(job.ranks, "all_reduce", 10)
        job.call(job.ranks, "all_reduce", 20, 5)
    job.call(0, "all_reduce", 10)
    job.call(1, "all_reduce", 20, 5)
    assert diagnose(job.record())[1] == "data-branch"


def test_a_line_that_one_rank_never_ran_is_parted_by_rank() -> None:
    job = JobBuilder(2)
    job.call(job.ranks, "all_reduce", 10)
    job.call(0, "all_reduce", 15)
    job.call(1, "all_reduce", 10, 5)
    assert diagnose(job.record())[1] == "rank-branch"


def test_a_skipped_batch_is_the_cause_of_the_wait_at_the_end() -> None:
    job = healthy_job()
    job.reduce_gradients(0)
    job.call(1, "barrier", 90)
    record = job.record(**on_loader(job, {0: (0, 1, 2, 3), 1: (0, 1, 3)}))
    divergence, trouble = diagnose(record)
    skip = skip_behind(divergence, record)
    assert trouble == "data-branch"
    assert skip is not None
    assert skip.sentence == "rank 1 runs no forward of the DDP model for batch 2 of pass 0, rank 0 does"
    assert (skip.named, skip.locations[0].line) == ((1,), LOOP_LINE)


def test_the_last_batch_counts_once_the_pass_is_over() -> None:
    job = healthy_job()
    assert list(skipped_batches(job.record(**on_loader(job, {0: (0, 1, 2, 3), 1: (0, 1, 2)}))))
    assert not list(skipped_batches(job.record(**on_loader(job, {0: (0, 1, 2, 3), 1: (0, 1, 2)}, end="open"))))


def test_batches_drawn_with_next_may_be_passed_over() -> None:
    job = healthy_job()
    record = job.record(**on_loader(job, {0: (0, 1, 2, 3), 1: (0, 2, 3)}, looped=False))
    assert not list(skipped_batches(record))


def test_batches_that_all_ranks_skip_are_nothing() -> None:
    job = healthy_job()
    assert not list(skipped_batches(job.record(**on_loader(job, {0: (0, 2, 3), 1: (0, 2, 3)}))))


def test_a_timeout_is_no_exit_of_the_rank_that_the_launcher_then_ended() -> None:
    job = healthy_job()
    job.groups[0] = Group(ranks=(0, 1), backend="gloo", timeout_ns=4_000_000_000)
    job.call(0, "barrier", 70)
    job.wait_in_last(0)
    job.tick(4_000)
    job.fail(0, "RuntimeError", 70, "Timed out waiting 4000ms for recv operation", communication=True)
    job.leave(1, "signalled", signal=15)
    record = job.record()
    assert find_divergence(record) is None
    wait = longest_wait(record)
    assert wait is not None
    assert (wait.timed_out, wait.waiting, wait.late) == (True, (0,), (1,))
    assert wait.before is not None and wait.before.line is not None and wait.before.line.line == 60


@pytest.mark.parametrize(("late_ms", "long"), [(1_000, False), (2_500, True)])
def test_a_wait_is_long_by_the_timeout_of_its_group(late_ms: int, long: bool) -> None:
    job = healthy_job()
    job.groups[0] = Group(ranks=(0, 1), timeout_ns=4_000_000_000)
    job.call(0, "barrier", 70)
    job.tick(late_ms)
    job.call(1, "barrier", 70)
    wait = longest_wait(job.record())
    assert (wait is not None) == long
    assert wait is None or (wait.late, wait.timed_out) == ((1,), False)
