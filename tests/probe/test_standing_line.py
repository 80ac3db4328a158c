"""Which line a rank is told to be at while what it calls there goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ddpdoctor.probe.live.heartbeat import StandingLine
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
