"""Some rows of the table of values that are not finite, and of the healthy jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.nonfinite import Batch, NonFinite
from tests.nan.cases import healthy, injections
from tests.nan.judge import complaints, watched

KINDS = [f"{kind} 0 on rank {rank} in step 3" for rank, kind in enumerate(("forward", "backward", "data"))]


def test_what_one_rank_makes_is_told_of_it(tmp_path: Path) -> None:
    name = KINDS[0]
    case = injections()[name]
    assert complaints(case, watched(case.script, tmp_path)) == []


@pytest.mark.parametrize("name", [*KINDS[1:], "data 2 on rank 1 in step 12", "optimizer 0 on rank 0 in step 3"])
def test_every_kind_is_told_as_what_it_is(name: str, tmp_path: Path) -> None:
    case = injections()[name]
    assert complaints(case, watched(case.script, tmp_path)) == []


@pytest.mark.parametrize("name", ["scaler that skips again and again", "a NaN loss whose step all ranks skip"])
def test_steps_that_are_skipped_are_in_order(name: str, tmp_path: Path) -> None:
    assert complaints(None, watched(healthy()[name], tmp_path)) == []


class _Elsewhere(torch.Tensor):  # type: ignore[misc]
    """A tensor whose number is not in this process, as a DTensor's is not: to read it is a collective."""

    def item(self) -> float:
        raise AssertionError("read")


@pytest.mark.parametrize("loss", [torch.ones(()).as_subclass(_Elsewhere), torch.ones((), device="meta")])
def test_a_loss_whose_number_is_elsewhere_is_not_read(loss: torch.Tensor, tmp_path: Path) -> None:
    watched = NonFinite(Journal(str(tmp_path), {"project_root": str(tmp_path)}), torch, lambda ddp: 0, Batch, lambda: 0)
    model = torch.nn.Linear(1, 1)
    model.module = torch.nn.Linear(1, 1)  # What is followed of a DDP model.
    watched.forward_begins(model)
    watched.backward_begins(loss)
    watched.backward_begins([loss])
