"""Which exceptions after a cut pass may be laid to the cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.probe.rehearsal.data.loaders import may_come_of_less_data


def raised(act: Callable[[], Any]) -> Exception:
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def of_this_file(name: str) -> bool:
    return name == __file__


def refuse(kind: type[Exception], text: str) -> None:
    raise kind(text)


@pytest.mark.parametrize(
    "act",
    [
        lambda: 1 / len([]),
        lambda: [][0],
        lambda: dict.fromkeys((1, 2))[3],
        lambda: refuse(RuntimeError, "The size of tensor a (40) must match the size of tensor b (400)"),
    ],
)
def test_less_data_may_be_the_cause(act: Callable[[], Any]) -> None:
    assert may_come_of_less_data(raised(act), of_this_file)


@pytest.mark.parametrize(
    "act",
    [
        lambda: Path(__file__).with_name("absent.txt").read_text(),
        lambda: refuse(RuntimeError, "mat1 and mat2"),
        lambda: {"loss": 1.0}["accu" + "racy"],
        lambda: None + 1,  # type: ignore[operator]
    ],
)
def test_more_data_would_not_have_helped(act: Callable[[], Any]) -> None:
    assert not may_come_of_less_data(raised(act), of_this_file)


def test_a_key_that_the_code_writes_elsewhere_may_have_needed_more_data() -> None:
    scores: dict[str, float] = {}
    assert may_come_of_less_data(raised(lambda: scores["precision"]), of_this_file)
    if scores:
        scores["precision"] = 1.0


def test_a_key_that_stands_where_it_is_asked_for_alone_is_missing_for_good() -> None:
    scores: dict[str, float] = {}
    error = raised(lambda: scores["specificity"])
    assert not may_come_of_less_data(error, of_this_file)
