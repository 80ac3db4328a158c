"""Accumulation, its end, the options of a wrap, and torch's own words, on records built by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from ddpdoctor.checks.death import root_exception
from ddpdoctor.checks.gradients import (
    accumulation_tail,
    double_wrap,
    misplaced_no_sync,
    missing_no_sync,
    needless_find_unused_parameters,
    no_gradient_bucket_view,
    parameter_ready_twice,
    syncbn_after_wrap,
    unsynchronised_batchnorm,
    wrapper_attribute_access,
)
from ddpdoctor.finding import Finding, Frame, Refuted, Severity
from ddpdoctor.record.model import Forward, RankException, RunRecord
from ddpdoctor.record.streams.training import MissingGradient, WrapChange
from tests.checks.replicas import BACKWARD_LINE, STEP_LINE, WRAP_LINE, Replicas
from tests.diagnosis.jobs import SCRIPT


def one(results: Iterator[Finding | Refuted]) -> Finding:
    (finding,) = results
    assert isinstance(finding, Finding)
    return finding


def accumulated(micro_steps: int, steps: int = 3, *, cleared: bool = True, late: bool = False) -> Replicas:
    job = Replicas()
    for _ in range(steps):
        for _ in range(micro_steps):
            job.forward()
            job.backward(inside_no_sync=late)
        job.optimizer_step(cleared=cleared)
    return job


def test_every_reduction_but_the_last_of_a_step_is_in_vain() -> None:
    finding = one(missing_no_sync.in_run(accumulated(4).seen()))
    assert (finding.severity, finding.locations[0].line) == (Severity.WARNING, BACKWARD_LINE)
    assert finding.title.endswith("all gradients of Net: 12.0 kB a step are sent for nothing")
    assert finding.evidence[0].numbers["reductions_per_step"] == 4


def test_one_reduction_a_step_refutes_the_suspicion() -> None:
    (refuted,) = missing_no_sync.in_run(accumulated(1).seen())
    assert isinstance(refuted, Refuted) and refuted.location.line == BACKWARD_LINE


def test_one_reduction_by_two_backwards_or_gradients_thrown_away_are_no_accumulation() -> None:
    halves = Replicas()
    for _ in range(3):
        halves.forward()
        halves.backward()
        halves.backward()
        halves.optimizer_step()
    assert not [found for found in missing_no_sync.in_run(halves.seen()) if isinstance(found, Finding)]
    cleared = Replicas()
    for _ in range(3):
        for _ in range(2):
            cleared.forward()
            cleared.backward()
            cleared.holds_gradients = False
        cleared.optimizer_step()
    assert not [found for found in missing_no_sync.in_run(cleared.seen()) if isinstance(found, Finding)]


def test_a_no_sync_that_comes_too_late_is_the_only_finding() -> None:
    record = accumulated(2, late=True).seen()
    finding = one(misplaced_no_sync.in_run(record))
    assert (finding.severity, finding.locations[0].line) == (Severity.WARNING, BACKWARD_LINE)
    assert finding.evidence[0].numbers["backwards"] == 6
    assert list(missing_no_sync.in_run(record)) == []


def with_tail(end: str, then: str, left: int = 1, batches: int = 8) -> RunRecord:
    """A pass of two steps of three backwards and some more, and what comes after it."""
    job = accumulated(3, 2)
    job.job["batches"] = batches
    for _ in range(left):
        job.forward()
        job.backward()
    job.pass_ends(end, 6 + left, None if end == "cut" else 6 + left)
    if then == "clears":
        job.holds_gradients = False
    if then == "steps":
        job.optimizer_step()
    if then in ("clears", "adds"):
        job.forward()
        job.backward()
    if then == "finishes":
        for rank in job.ranks:
            job.leave(rank, "finished")
    return job.seen()


@pytest.mark.parametrize(("then", "fate"), [("clears", "discarded"), ("adds", "next pass"), ("finishes", "discarded")])
def test_the_end_of_a_whole_pass_without_a_step_is_advice(then: str, fate: str) -> None:
    finding = one(accumulation_tail.in_run(with_tail("exhausted", then, left=2)))
    assert (finding.severity, finding.locations[0].line) == (Severity.ADVICE, STEP_LINE)
    assert finding.title.startswith("no optimizer step follows the last 2 of 8 batches of a pass")
    assert finding.title.endswith(fate)


@pytest.mark.parametrize(
    ("end", "then", "left"),
    [("cut", "adds", 1), ("exhausted", "steps", 1), ("exhausted", "adds", 0), ("exhausted", "", 1)],
    ids=["our own cut", "a step after the loop", "nothing is left", "the rehearsal ended there"],
)
def test_a_tail_that_is_not_known_or_not_there_says_nothing(end: str, then: str, left: int) -> None:
    assert list(accumulation_tail.in_run(with_tail(end, then, left))) == []


def test_a_pass_that_was_longer_than_the_script_was_told_says_nothing() -> None:
    assert list(accumulation_tail.in_run(with_tail("exhausted", "clears", 2, batches=4))) == []
    assert len(list(accumulation_tail.in_run(with_tail("exhausted", "clears", 2, batches=0)))) == 1


def searching(job: Replicas, by_user: bool = True, **streams: Any) -> list[Finding | Refuted]:
    options = {"find_unused_parameters": True, "static_graph": False}
    wraps = tuple(job.wrapped(rank, options=options, by_user=by_user) for rank in job.ranks)
    return list(needless_find_unused_parameters.in_run(job.seen(wraps=wraps, **streams)))


def test_a_search_is_needless_after_enough_backwards_and_refuted_by_an_unused_parameter() -> None:
    finding = one(iter(searching(accumulated(1, 5))))
    assert (finding.severity, finding.locations[0].line) == (Severity.WARNING, WRAP_LINE)
    assert "in 5 synchronised backwards every parameter of Net got a gradient on every rank" in finding.title
    framework = one(iter(searching(accumulated(1, 5), by_user=False)))
    assert framework.severity is Severity.ADVICE and "ddp_find_unused_parameters=False" in framework.remedy
    assert searching(accumulated(1, 3)) == []
    missing = (MissingGradient(rank=1, wrap=0, parameters=("head.weight",)),)
    (refuted,) = searching(accumulated(1, 5), missing_gradients=missing)
    assert isinstance(refuted, Refuted)


def batch_norms(layers: int, batch_size: int) -> list[Finding | Refuted]:
    job = Replicas()
    job.loader(batch_size=batch_size)
    forwards = tuple(
        Forward(rank=rank, wrap=0, gradients=True, training=True, pass_loader=0, batch_norms=layers)
        for rank in job.ranks
    )
    return list(unsynchronised_batchnorm.in_run(job.seen(forwards=forwards)))


def test_small_batches_of_trained_batch_norms_are_advice_and_others_refute_it() -> None:
    finding = one(iter(batch_norms(3, 4)))
    assert (finding.severity, finding.title) == (Severity.ADVICE, "3 BatchNorm layers normalise over 4 samples a rank")
    assert all(isinstance(found, Refuted) for found in (*batch_norms(0, 4), *batch_norms(3, 32)))


def test_a_second_copy_of_large_gradients_is_advice() -> None:
    job = Replicas()
    large = tuple(msgspec.structs.replace(t, size_bytes=60_000_000) for t in job.wrapped(0).parameters)
    for views, kind in ((False, Finding), (True, Refuted)):
        options = {"gradient_as_bucket_view": views}
        wraps = tuple(job.wrapped(rank, parameters=large, options=options) for rank in job.ranks)
        (found,) = no_gradient_bucket_view.in_run(job.seen(wraps=wraps))
        assert isinstance(found, kind)
    (small,) = no_gradient_bucket_view.in_run(job.seen())
    assert isinstance(small, Refuted)


def test_a_wrap_inside_a_wrap_counts_when_both_reduce_among_the_same_ranks() -> None:
    job = Replicas()
    inner = tuple(job.wrapped(rank) for rank in job.ranks)
    outer = tuple(job.wrapped(rank, wrap=1, contains=(0,), site=job.site(31)) for rank in job.ranks)
    finding = one(double_wrap.in_run(job.seen(wraps=inner + outer)))
    assert (finding.locations[0].line, finding.evidence[0].numbers["bytes_twice"]) == (31, 4_000)
    within = tuple(job.wrapped(rank, ranks=(rank,)) for rank in job.ranks)
    assert list(double_wrap.in_run(job.seen(wraps=within + outer))) == []


def test_batch_norms_that_were_converted_late_are_an_error() -> None:
    job = Replicas()
    changes = tuple(WrapChange(rank=rank, wrap=0, site=job.site(40), late_batch_norms=2) for rank in job.ranks)
    finding = one(syncbn_after_wrap.in_run(job.seen(wrap_changes=changes)))
    assert finding.title == "2 SyncBatchNorm layers came into Net after DDP had wrapped it"


def failed(message: str, **fields: Any) -> RunRecord:
    job = Replicas()
    job.call(0, "barrier", 70)
    job.wait_in_last(0)
    raised = RankException(
        time_ns=job.tick(), type="RuntimeError", message=message, frames=(Frame(SCRIPT, 66, "train"),), **fields
    )
    job.leave(1, "raised", exceptions=(raised,), exit_code=1)
    return job.seen()


def test_a_parameter_marked_twice_is_named_by_its_index_and_takes_the_place_of_the_exception() -> None:
    message = "Expected to mark a variable ready only once. … Parameter at index 1 has been marked as ready twice."
    record = failed(message, traceback='File "/x/torch/utils/checkpoint.py", line 3, in backward')
    finding = one(parameter_ready_twice.in_run(record))
    assert finding.title == "the gradient of head.weight arrived twice in one backward: reentrant checkpoints share it"
    assert ([place.line for place in finding.locations], finding.ranks) == ([66, WRAP_LINE], (1,))
    assert "use_reentrant=False" in finding.remedy
    assert list(root_exception.in_run(record)) == []
    assert "sum of the losses" in one(parameter_ready_twice.in_run(failed(message))).remedy


def test_an_attribute_of_the_inner_model_takes_the_place_of_the_exception() -> None:
    message = "'DistributedDataParallel' object has no attribute 'encode'"
    record = failed(message, attribute_owner="Net")
    finding = one(wrapper_attribute_access.in_run(record))
    assert finding.title == "the DDP object has no attribute encode: it is Net's, which is .module"
    assert list(root_exception.in_run(record)) == []
    assert list(wrapper_attribute_access.in_run(failed(message))) == []
    assert [type(found) for found in root_exception.in_run(failed(message))] == [Finding]
