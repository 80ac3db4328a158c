"""``ddpdoctor.testing.assert_equivalent`` on steps of this module's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ddpdoctor.testing import assert_equivalent


def _loss(summed: bool) -> Any:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    loss = torch.nn.functional.mse_loss(model(x[mine]), y[mine])
    (loss * dist.get_world_size() if summed else loss).backward()
    return model


def right_step() -> Any:
    return _loss(summed=False)


def summed_step() -> Any:
    return _loss(summed=True)


def failing_step() -> Any:
    raise ValueError("no data")


def test_a_mean_over_the_ranks_is_that_of_one_process() -> None:
    assert_equivalent(right_step)


@pytest.mark.parametrize(("step", "words"), [(summed_step, "2.00"), (failing_step, "no data")])
def test_what_differs_is_said(step: Callable[[], Any], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        assert_equivalent(step)


def test_a_step_inside_of_a_function_is_refused() -> None:
    with pytest.raises(TypeError, match="function of a module"):
        assert_equivalent(lambda: None)
