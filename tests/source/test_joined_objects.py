"""What a variable holds after a condition that may have been true, where some ranks alone ran what is behind it."""

from __future__ import annotations

import pytest

from ddpdoctor.source.interpreter.values import NONE, RANKS, ExternalObject, OneOf, PerRank, Value, join, on_rank
from ddpdoctor.source.vocabulary import DDP


def wrapped(number: int) -> ExternalObject:
    return ExternalObject(number, DDP)


WRITER = ExternalObject(9, "torch.utils.tensorboard.SummaryWriter")
MAYBE: dict[str, Value] = {
    "one or none": OneOf((wrapped(1), NONE)),
    "one of two or none": OneOf((wrapped(1), wrapped(2), NONE)),
    "one": wrapped(1),
}


@pytest.mark.parametrize("name", MAYBE)
@pytest.mark.parametrize("rank", RANKS)
def test_a_rank_that_makes_one_more_may_hold_what_the_others_hold(name: str, rank: int) -> None:
    before = MAYBE[name]
    lanes: list[Value] = [before] * len(RANKS)
    lanes[rank] = wrapped(3)
    for joined in (join(PerRank(tuple(lanes)), before), join(before, PerRank(tuple(lanes)))):
        assert isinstance(joined, PerRank)
        held = on_rank(joined, rank)
        assert isinstance(held, OneOf) and wrapped(3) in held.options
        assert (NONE in held.options) is (name != "one")
        assert [on_rank(joined, other) for other in RANKS if other != rank] == [before] * (len(RANKS) - 1)


def test_what_one_rank_alone_has_is_still_its_own() -> None:
    lanes = PerRank((WRITER, NONE, NONE, NONE))
    assert join(lanes, NONE) == lanes == join(OneOf((wrapped(1), NONE)), lanes)
