"""Batches of several ranks as one: structures that tensors stand in, and what cannot be joined."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import pytest
import torch

from ddpdoctor.probe.rehearsal.equivalence.feeding import MOST_BYTES, CannotJoin, Feeding, joined


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


def kept_of(samples: Any, already: int = 0) -> bytes | str:
    feeding = Feeding.__new__(Feeding)
    feeding._torch, feeding._bytes = torch, already
    return feeding._pickled(samples)


def test_of_samples_that_are_parts_of_one_tensor_only_the_parts_are_kept() -> None:
    whole = torch.arange(4_000_000.0).view(-1, 4)
    kept = kept_of([(whole[number], number) for number in range(8)])
    assert isinstance(kept, bytes)
    assert len(kept) < 20_000
    assert [(row.tolist(), number) for row, number in pickle.loads(kept)][7] == ([28.0, 29.0, 30.0, 31.0], 7)


def test_no_more_is_pickled_than_may_be_kept() -> None:
    assert "more than 256 MB" in kept_of([torch.zeros(100)], already=MOST_BYTES - 100)
    assert "cannot be pickled" in kept_of([lambda: None])
