"""Which line a rank is told to be at while what it calls there goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

from ddpdoctor.probe.live.clocks import DATA_WAIT, OTHER
from ddpdoctor.probe.live.heartbeat import LOOKS_WRITTEN, Looks, StandingLine
from ddpdoctor.probe.user_code import UserCode

MS = 1_000_000
Look = Callable[[], object]


class Watched:
    """Looks every 200 ms at who calls, and notes the function that is told."""

    def __init__(self) -> None:
        self._line = StandingLine(UserCode(""))
        self.now_ns = 0
        self.moved_ns = 0
        self.told: list[str] = []

    def look(self) -> None:
        self.now_ns += 200 * MS
        frame = self._line.look(sys._getframe(1), self.moved_ns, self.now_ns)
        self.told.append("" if frame is None else frame.f_code.co_name)


def _batch(look: Look) -> None:
    look()


def _evaluate(look: Look) -> None:
    _batch(look)
    look()
    _batch(look)
    look()
    _batch(look)


def _train(watched: Watched) -> None:
    for _ in range(5):
        watched.moved_ns = watched.now_ns
        watched.look()
    _evaluate(watched.look)
    for _ in range(4):
        watched.look()


def test_an_evaluation_is_told_by_the_line_that_calls_it_and_a_training_loop_by_none() -> None:
    watched = Watched()
    _train(watched)
    assert watched.told[:5] == [""] * 5
    assert watched.told[5:10] == ["", "", "", "_train", "_train"]
    assert watched.told[10:] == ["", "", "", "_train"]


def test_a_function_that_stands_itself_is_told_rather_than_who_called_it() -> None:
    watched = Watched()

    def wait() -> None:
        for _ in range(5):
            watched.look()

    wait()
    assert watched.told == ["", "", "", "wait", "wait"]


class Events:
    def __init__(self) -> None:
        self.written: list[tuple[str, dict[str, Any]]] = []

    def event(self, name: str, **fields: Any) -> None:
        self.written.append((name, fields))


def test_looks_are_written_once_there_are_some_and_each_counts_once() -> None:
    looks, events = Looks(), Events()
    for number in range(LOOKS_WRITTEN - 1):
        looks.note(OTHER, number % 2)
        looks.write(cast("Any", events), all_of_them=False)
    assert not events.written
    looks.note(DATA_WAIT, 7)
    looks.write(cast("Any", events), all_of_them=False)
    told = {(fields["phase"], fields["site"]): fields["looks"] for _, fields in events.written}
    assert told == {("other", 0): 12, ("other", 1): 12, ("data_wait", 7): 1}
    looks.note(OTHER, 0)
    looks.write(cast("Any", events), all_of_them=True)
    assert events.written[-1] == ("looked", {"phase": "other", "site": 0, "looks": 1})
