"""Batches of several ranks as one: structures that tensors stand in, and what cannot be joined."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from ddpdoctor.probe.rehearsal.equivalence.feeding import CannotJoin, joined


class Pair(NamedTuple):
    x: Any
    y: Any


def test_tensors_are_joined_wherever_they_stand() -> None:
    first = {"x": torch.zeros(2, 3), "rest": [Pair(torch.zeros(2), torch.ones(2)), ("a", "b")], "scale": 0.5}
    second = {"x": torch.ones(1, 3), "rest": [Pair(torch.ones(1), torch.ones(1)), ("c",)], "scale": 0.5}
    whole = joined([first, second], torch)
    assert whole["x"].shape == (3, 3) and whole["x"][2].sum() == 3
    assert isinstance(whole["rest"][0], Pair) and whole["rest"][0].x.tolist() == [0, 0, 1]
    assert whole["rest"][1] == ("a", "b", "c") and whole["scale"] == 0.5


@pytest.mark.parametrize(
    "parts",
    [
        [torch.zeros(2, 3), torch.zeros(2, 4)],
        [torch.zeros(()), torch.zeros(())],
        [{"x": 1}, {"y": 1}],
        [[torch.zeros(1)], [torch.zeros(1)] * 2],
        [0.5, 0.25],
        [torch.zeros(1), [torch.zeros(1)]],
    ],
    ids=["lengths", "no dimension", "keys", "numbers of tensors", "numbers", "types"],
)
def test_what_cannot_be_joined_is_refused(parts: list[Any]) -> None:
    with pytest.raises(CannotJoin):
        joined(parts, torch)
