"""Whose NaN it was, from rows that are built by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ddpdoctor.check import TooLittleEvidence
from ddpdoctor.checks.gradients import nonfinite_training
from ddpdoctor.diagnosis.training.nonfinite import Origin, origin
from ddpdoctor.record.model import Job, RunRecord
from ddpdoctor.record.streams.training import NonFinite
from tests.diagnosis.jobs import JobBuilder


def row(rank: int, kind: Any = "parameter", backward: int = 5, **fields: Any) -> NonFinite:
    return NonFinite(rank=rank, kind=kind, backward=backward, step=backward, **fields)


def after_step(rank: int, backward: int = 5, finite: bool | None = False, **fields: Any) -> NonFinite:
    return row(rank, backward=backward, after_step=True, broken=4, gradients_finite=finite, **fields)


def of(*rows: NonFinite, ranks: int = 3, **job: Any) -> RunRecord:
    return JobBuilder(ranks, **job).record(nonfinites=rows)


def found(*rows: NonFinite) -> Origin:
    result = origin(of(*rows))
    assert result is not None
    return result


def test_the_rank_with_the_loss_is_named_and_the_others_received_it() -> None:
    loss = row(1, "loss", operation="sqrt", module="guard", module_class="Guard", batch_finite=True)
    result = found(after_step(0), loss, after_step(1), after_step(2))
    assert (result.cause, result.ranks, result.received, result.first.step) == ("forward", (1,), (0, 2), 5)


def test_the_batch_comes_before_what_it_makes() -> None:
    loss = row(2, "loss", operation="mse_loss", batch_finite=False, samples=(17,))
    assert found(*map(after_step, range(3)), loss).cause == "data"


def test_a_later_row_of_the_same_loss_knows_more() -> None:
    loss = row(1, "loss", operation="sqrt")
    result = found(loss, after_step(1), row(1, "loss", operation="sqrt", module="guard"))
    assert result.first.module == "guard"


def test_a_gradient_is_of_the_backward() -> None:
    result = found(*map(after_step, range(3)), row(0, "gradient", parameters=("first.bias",)))
    assert (result.cause, result.ranks) == ("backward", (0,))


def test_finite_gradients_are_the_optimizers() -> None:
    result = found(after_step(1, 5, finite=True), after_step(0, 6), after_step(2, 6))
    assert (result.cause, result.ranks, result.received, result.first.step) == ("optimizer", (1,), (0, 2), 5)


def test_what_no_rank_has_seen_begin_is_not_blamed_on_one() -> None:
    result = found(*map(after_step, range(3)))
    assert (result.cause, result.ranks) == ("unknown", ())


def test_losses_that_left_the_parameters_finite_are_in_order() -> None:
    assert origin(of(row(1, "loss"), row(0, "gradient"))) is None


def test_many_in_a_row_are_told_although_a_scaler_skips_them() -> None:
    result = found(row(1, "loss", operation="exp", streak=64))
    assert (result.cause, result.ranks) == ("forward", (1,))


def test_what_the_rehearsal_injected_is_its_own() -> None:
    assert origin(of(*map(after_step, range(3)), stress="nan")) is None


@pytest.mark.parametrize("unlike", [{"pretended": ("MNIST",)}, {"batch_size": "2"}, {"device": "stand-in"}])
def test_a_rehearsal_that_is_unlike_the_job_proves_nothing(unlike: dict[str, Any]) -> None:
    record = of(*map(after_step, range(3)), **unlike)
    assert isinstance(record.job, Job) and record.job.kind == "rehearsal"
    with pytest.raises(TooLittleEvidence):
        list(nonfinite_training.in_run(record))
