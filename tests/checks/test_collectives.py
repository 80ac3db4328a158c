"""What the checks of collectives say of records built by hand that hold no divergence, or one with a shade."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ddpdoctor.checks.collectives import (
    barrier_in_hot_loop,
    data_dependent_divergence,
    hang,
    long_wait,
    rank_zero_forward,
    reduce_before_backward,
    subset_new_group,
)
from ddpdoctor.checks.collectives.divergences_run import find_model_mismatch
from ddpdoctor.finding import Confirmed, Finding, FoundInRun, Refuted, Severity
from ddpdoctor.record.streams.collectives import Group, OutsiderCall, ReducedLoss
from ddpdoctor.record.streams.training import Backward
from tests.diagnosis.jobs import SCRIPT, JobBuilder, healthy_job
from tests.diagnosis.test_causes import LOOP_LINE, forwards, on_loader

DIFFER = "DDP expects same model across all ranks, but Rank 1 has 6 params, while rank 0 has inconsistent {} params."


def only(results: Iterable[FoundInRun]) -> Finding:
    (finding,) = results
    assert isinstance(finding, Finding)
    return finding


def hot(steps: int, barriers: tuple[int, ...], loader: int = -1) -> JobBuilder:
    """Steps of one loop, with a barrier at line 70 in some of them."""
    job = JobBuilder(2)
    job.streams["forwards"] = ()
    for step in range(1, steps + 1):
        job.step(job.ranks, step)
        job.reduce_gradients(job.ranks)
        if step in barriers:
            job.call(job.ranks, "barrier", 70)
        job.streams["forwards"] += tuple(
            forwards(job, rank, 40, step=step, pass_loader=loader, pass_ordinal=0) for rank in job.ranks
        )
    return job


def test_a_barrier_in_every_step_is_told_with_its_number() -> None:
    finding = only(barrier_in_hot_loop.in_run(hot(6, (1, 2, 3, 4, 5, 6)).record()))
    assert finding.title == (
        "every training step waits in barrier at train.py:70: 6 calls in 6 steps of each rank, although backward "
        "already synchronises the ranks"
    )


@pytest.mark.parametrize(("steps", "barriers"), [(6, (2, 4, 6)), (6, (6,)), (3, (1, 2, 3))])
def test_a_barrier_in_some_steps_or_in_a_short_loop_is_none(steps: int, barriers: tuple[int, ...]) -> None:
    assert list(barrier_in_hot_loop.in_run(hot(steps, barriers).record())) == []


def trained(job: JobBuilder, steps: int, reduces: Iterable[int], line: int = 50) -> JobBuilder:
    """So many steps with a backward at a line, and a reduction at line 70 after some of them."""
    for step in range(1, steps + 1):
        job.reduce_gradients(job.ranks)
        job.streams["backwards"] = (
            *job.streams.get("backwards", ()),
            *(Backward(rank=rank, site=job.site(line), time_ns=job.tick()) for rank in job.ranks),
        )
        if step in reduces:
            job.call(job.ranks, "all_reduce", 70, 2, reduce_op="sum")
    return job


def said_of(job: JobBuilder) -> list[FoundInRun]:
    return list(barrier_in_hot_loop.in_run(job.record()))


@pytest.mark.parametrize("ran", [6, 5], ids=["every step", "all but the last"])
def test_reductions_in_every_step_confirm_what_the_source_suspects_and_nothing_else(ran: int) -> None:
    (confirmed,) = said_of(trained(JobBuilder(2), 6, range(1, ran + 1)))
    assert isinstance(confirmed, Confirmed)
    assert (confirmed.location.file, confirmed.location.line) == (SCRIPT, 70)
    assert confirmed.fact.text == f"each rank ran it in {ran} of 6 training steps ({ran} times, 8 bytes each)"
    assert confirmed.fact.numbers == {"calls": ran, "steps": 6, "bytes_per_call": 8}


@pytest.mark.parametrize("steps", [(1, 2, 3), (6,)])
def test_reductions_in_half_of_the_steps_or_fewer_refute_it(steps: tuple[int, ...]) -> None:
    (refuted,) = said_of(trained(JobBuilder(2), 6, steps))
    assert isinstance(refuted, Refuted)
    assert (refuted.location.line, refuted.reason) == (70, f"it ran in {len(steps)} of 6 training steps")


def test_reductions_that_tell_nothing_say_nothing() -> None:
    assert said_of(trained(JobBuilder(2), 6, (1, 2, 3, 4))) == [], "in most steps"
    assert said_of(trained(JobBuilder(2), 3, range(4))) == [], "in few steps"
    before = JobBuilder(2)
    before.call(before.ranks, "all_reduce", 70)
    assert said_of(trained(before, 6, ())) == [], "before the training"
    lone = trained(JobBuilder(2), 6, ())
    lone.call(0, "all_reduce", 70)
    assert said_of(lone) == [], "on one rank only"


def test_a_line_that_several_loops_come_to_is_in_every_step_of_one() -> None:
    job = trained(JobBuilder(2), 8, (8,), 90)
    (confirmed,) = said_of(trained(trained(job, 6, range(1, 7)), 8, (8,), 91))
    assert isinstance(confirmed, Confirmed)
    assert confirmed.fact.numbers["steps"] == 6


def test_a_broadcast_of_a_lone_forward_that_met_training_is_luck() -> None:
    job = healthy_job()
    job.call(0, "broadcast", 80, 64, origin="ddp-forward", root=0)
    job.call(1, "broadcast", 40, 64, origin="ddp-forward", root=0)
    job.reduce_gradients(job.ranks)
    seen = (*(forwards(job, rank, 40) for rank in job.ranks), forwards(job, 0, 80))
    finding = only(rank_zero_forward.in_run(job.record(forwards=seen)))
    assert (finding.severity, finding.ranks, finding.locations[0].line) == (Severity.WARNING, (0,), 80)
    everywhere = (*seen, forwards(job, 1, 80))
    assert list(rank_zero_forward.in_run(job.record(forwards=everywhere))) == []


def test_batches_skipped_equally_often_are_a_warning() -> None:
    job = healthy_job()
    finding = only(data_dependent_divergence.in_run(job.record(**on_loader(job, {0: (0, 1, 3), 1: (0, 2, 3)}))))
    assert (finding.severity, finding.locations[0].line) == (Severity.WARNING, LOOP_LINE)


@pytest.mark.parametrize(("sleep_s", "severity"), [(60, Severity.WARNING), (3_600, Severity.ERROR)])
def test_a_sleep_is_as_bad_as_it_is_long(sleep_s: int, severity: Severity) -> None:
    job = healthy_job()
    job.groups[0] = Group(ranks=(0, 1), timeout_ns=1_800_000_000_000)
    job.call(0, "barrier", 70)
    job.wait_in_last(0)
    job.tick(6_000)
    job.of_rank[1] |= {"stuck": True, "sleeps_until_ns": job.now_ns + sleep_s * 1_000_000_000}
    finding = only(hang.in_run(job.record()))
    assert finding.severity == severity
    assert finding.title.startswith("rank 1 sleeps at an unknown line for another")


@pytest.mark.parametrize(("sleep_ms", "remedy"), [(400, "Check what the loop around"), (60_000, "Sleep less")])
def test_a_short_sleep_of_a_rank_that_stood_long_is_taken_for_a_loop_that_waits(sleep_ms: int, remedy: str) -> None:
    job = healthy_job()
    job.groups[0] = Group(ranks=(0, 1), timeout_ns=1_800_000_000_000)
    job.call(0, "barrier", 70)
    job.wait_in_last(0)
    job.tick(6_000)
    job.of_rank[1] |= {"stuck": True, "sleeps_until_ns": job.now_ns + sleep_ms * 1_000_000}
    assert only(hang.in_run(job.record())).remedy.startswith(remedy)


def test_a_rank_that_asks_for_a_file_while_nothing_moves_is_a_warning_that_names_the_file() -> None:
    job = healthy_job()
    job.call(0, "barrier", 70)
    job.wait_in_last(0)
    job.tick(6_000)
    job.of_rank[1] |= {"stuck": True, "polls_for": "/data/cache/READY"}
    finding = only(hang.in_run(job.record()))
    assert finding.severity == Severity.WARNING
    assert finding.title.startswith("rank 1 polls at an unknown line for READY while rank")
    assert "must do so before it waits in a collective that rank 1 reaches later" in finding.remedy


def test_a_stopped_rank_is_told_to_be_stopped() -> None:
    job = healthy_job()
    job.call(0, "barrier", 70)
    job.wait_in_last(0)
    job.tick(6_000)
    job.of_rank[1] |= {"stuck": True, "stopped": True}
    finding = only(hang.in_run(job.record()))
    assert finding.title == "rank 1 is stopped by a signal while rank 0 waits in barrier at train.py:70"
    assert "kill -CONT" in finding.remedy


def test_a_wait_says_who_waited_for_whom_and_against_which_timeout() -> None:
    job = healthy_job()
    job.groups[0] = Group(ranks=(0, 1), timeout_ns=4_000_000_000)
    job.call(0, "barrier", 70)
    job.tick(2_500)
    job.call(1, "barrier", 70)
    finding = only(long_wait.in_run(job.record()))
    assert (finding.severity, finding.ranks) == (Severity.WARNING, (1,))
    assert finding.title == (
        "rank 0 waited 2.5 s in barrier at train.py:70 for rank 1, busy since train.py:60; the timeout is 4.0 s"
    )


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            DIFFER.format(4),
            "the ranks build DDP from different models: rank 1 has 6 parameters where another rank has 4",
        ),
        (
            "params[2] in this process with sizes [8, 8] appears not to match sizes of the same param in process 0.",
            "the ranks build DDP from different models: parameter 2 has the shape [8, 8] on rank 1 and a different "
            "one on rank 0",
        ),
        (DIFFER.format(0), ""),
        (DIFFER.format(139730345984), ""),
    ],
)
def test_different_models_are_told_by_their_parameters_unless_the_count_is_none(message: str, told: str) -> None:
    job = JobBuilder(2)
    job.fail(0, "RuntimeError", 30, "Connection closed by peer", communication=True)
    job.fail(1, "RuntimeError", 30, message)
    mismatch = find_model_mismatch(job.record())
    assert (mismatch.sentence if mismatch else "") == told


def test_a_reduced_loss_and_a_call_of_an_outsider_are_told_by_line() -> None:
    job = healthy_job()
    reduced = tuple(ReducedLoss(rank=rank, site=job.site(50), backward_site=job.site(51)) for rank in job.ranks)
    finding = only(reduce_before_backward.in_run(job.record(reduced_losses=reduced)))
    assert (finding.severity, [place.line for place in finding.locations]) == (Severity.ERROR, [50, 51])
    calls = (OutsiderCall(rank=1, operation="all_reduce", site=job.site(55)),)
    finding = only(subset_new_group.in_run(job.record(outsider_calls=calls)))
    assert (finding.severity, finding.ranks) == (Severity.WARNING, (1,))
    assert finding.title == "rank 1 calls all_reduce at train.py:55 on a group without it, which has no effect there"
