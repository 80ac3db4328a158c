"""Which values of a script may be the number of its ranks, and what they are for one."""

from __future__ import annotations

import types
from typing import Any

import pytest

from ddpdoctor.probe.rehearsal.equivalence.named_ranks import _reads_number, as_one


@pytest.mark.parametrize(
    ("value", "one"),
    [
        (2, 1),
        ("2", "1"),
        ("--world-size=2", "--world-size=1"),
        ("trainer.devices=0,1", "trainer.devices=0"),
        ("3, 5", "3"),
        ([0, 1], [0]),
        (["4", "7"], ["4"]),
    ],
)
def test_a_value_that_may_be_the_number(value: Any, one: Any) -> None:
    assert as_one(value, 2) == one


NO_NUMBERS: tuple[Any, ...] = (True, 3, "12", "lr=0.2", "a,b", "0,1,2", [0.5, 0.5], [], None, 2.0, "", "--x=", "2e")


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_a_value_that_is_none(value: Any) -> None:
    assert as_one(value, 2) is None


def test_a_number_that_ranks_read_for_themselves() -> None:
    body = "def main(rank, world): pass\nclass Trainer:\n    def step(self):\n        return [W for _ in '']\n"
    for text, reads in ((f"W = 2\n{body}", True), (f"W = 3\n{body}", False), (f"EPOCHS = 2\n{body}", False)):
        module = types.ModuleType("train")
        exec(text, module.__dict__)
        assert any(_reads_number(module.__dict__["main"], 2)) is reads
