"""An exception that the handler of a signal raises is told from one that the rank raises by itself."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from ddpdoctor.probe.process import _signal_below


class Preempted(RuntimeError):
    pass


def plain(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _leave(number)


def _leave(number: int) -> None:
    raise Preempted(number)


def starred(*given: Any) -> None:
    raise Preempted


def keyed(extra: str, number: int, frame: object) -> None:
    raise Preempted(extra)


class Handler:
    def __call__(self, number: int, frame: object) -> None:
        raise Preempted


def _raised_by(handler: Callable[[int, Any], object], number: signal.Signals) -> BaseException:
    before = signal.signal(number, handler)
    try:
        os.kill(os.getpid(), number)
        for _ in range(1000):
            pass
        raise AssertionError("the signal did not come")
    except Preempted as error:
        return error
    finally:
        signal.signal(number, before)


def _save_and_leave(error: BaseException) -> None:
    try:
        raise error
    except Preempted:
        raise SystemError("saved, leaving") from None


@pytest.mark.parametrize(
    "handler", [plain, starred, functools.partial(keyed, "x"), Handler(), lambda n, f, more=1: plain(n, f)]
)
def test_the_signal_is_known_whatever_the_handler_is(handler: Callable[[int, Any], object]) -> None:
    assert _signal_below(_raised_by(handler, signal.SIGTERM)) == signal.SIGTERM


def test_it_is_known_of_what_the_script_makes_of_the_exception() -> None:
    with pytest.raises(SystemError) as caught:
        _save_and_leave(_raised_by(plain, signal.SIGUSR1))
    assert _signal_below(caught.value) == signal.SIGUSR1


def test_a_timer_of_the_script_and_any_other_exception_are_its_own() -> None:
    assert _signal_below(_raised_by(plain, signal.SIGALRM)) == 0
    with pytest.raises(Preempted) as caught:
        plain(15, None)
    assert _signal_below(caught.value) == 0
