"""Where a rank stands, and what the handlers of signals have to do with it."""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from ddpdoctor.launch.processes import handles
from ddpdoctor.monitor.processes.stacks import SignalledStacks, signal_for_stacks
from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.live.clocks import DATA_WAIT, OTHER
from ddpdoctor.probe.live.heartbeat import LOOKS_WRITTEN, Looks, StandingLine
from ddpdoctor.probe.process import _signal_below
from ddpdoctor.probe.user_code import UserCode
from ddpdoctor.record import layout

# An exception that the handler of a signal raises is told from one that the rank raises by itself.


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


# The signal by which stacks are asked for is never sent where the script has taken the handler away.
_SCRIPT = """
import faulthandler, signal, sys, time
from ddpdoctor.probe.heartbeat import register_for_stacks
before = signal.getsignal(signal.SIGUSR2)
register_for_stacks(sys.argv[1])
{then}
for _ in range(2):
    print("here", flush=True)
    sys.stdin.readline()
"""
_TAKEN = {
    "restored as it was": "signal.signal(signal.SIGUSR2, before)",
    "a handler of its own": "signal.signal(signal.SIGUSR2, lambda *_: sys.exit(7))",
    "unregistered": "faulthandler.unregister(signal.SIGUSR2)",
    "registered anew": "faulthandler.register(signal.SIGUSR2)",
}


@pytest.mark.parametrize("then", _TAKEN.values(), ids=_TAKEN.keys())
def test_the_licence_goes_before_the_handler(tmp_path: Path, then: str) -> None:
    with _started(tmp_path, then) as process:
        assert not (tmp_path / layout.STACKS_FILE.format(process.pid)).exists()
        _ask(tmp_path, process.pid)
        _assert_it_lives(process)


def test_stacks_are_written_where_the_script_lets_the_signal_alone(tmp_path: Path) -> None:
    with _started(tmp_path, "signal.signal(signal.SIGUSR1, print)") as process:
        assert handles(process.pid, signal.SIGUSR2)
        dumps = signal_for_stacks(tmp_path, {process.pid: 0})
        assert any(frame.function == "<module>" for dump in dumps for frame in dump.frames)


def test_a_handler_that_went_behind_our_back_is_seen(tmp_path: Path) -> None:
    with _started(tmp_path, "import _signal; _signal.signal(signal.SIGUSR2, _signal.SIG_DFL)") as process:
        assert (tmp_path / layout.STACKS_FILE.format(process.pid)).exists()
        _ask(tmp_path, process.pid)
        _assert_it_lives(process)


def _assert_it_lives(process: subprocess.Popen[str]) -> None:
    """A signal that was sent before is dealt with before it answers."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "here\n"


def _ask(folder: Path, pid: int) -> None:
    signal_for_stacks(folder, {pid: 0})
    SignalledStacks(folder).ask(pid, pid, time.time_ns())


@contextmanager
def _started(folder: Path, then: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _SCRIPT.format(then=then), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "here\n"
            yield process
        finally:
            process.kill()


# Which line a rank is told to be at while what it calls there goes on.
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


# The number of a call chain: one for the same lines, however often they run, another for any other line.


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(str(tmp_path), {"project_root": str(Path(__file__).parents[2])})


def sites(journal: Journal) -> list[list[Any]]:
    lines = Path(journal.run_directory, layout.EVENTS_FILE.format(os.getpid())).read_text().splitlines()
    return [event["frames"] for event in map(json.loads, lines) if event["event"] == "site"]


def here(journal: Journal) -> int:
    return journal.site(sys._getframe(1))


def test_a_line_that_runs_again_has_the_same_number(journal: Journal) -> None:
    numbers = {here(journal) for _ in range(3)}
    assert len(numbers) == 1
    assert len(sites(journal)) == 1


def test_two_calls_on_one_line_are_one_site_and_two_lines_are_two(journal: Journal) -> None:
    one, other = here(journal), here(journal)
    third = here(journal)
    assert one == other != third


def test_callers_tell_chains_apart(journal: Journal) -> None:
    def inner() -> int:
        return here(journal)

    first = inner()
    second = inner()
    assert first != second
    (inside, caller), (inside_again, next_caller) = (frames[:2] for frames in sites(journal))
    assert inside == inside_again
    assert caller[1] + 1 == next_caller[1]


def test_code_that_is_gone_never_lends_its_number_to_other_code(journal: Journal) -> None:
    numbers = []
    for line in range(1, 30):
        source = "\n" * line + "number = journal.site(sys._getframe(0))"
        space: dict[str, Any] = {"journal": journal, "sys": sys}
        exec(compile(source, str(Path(__file__).with_name("made_up.py")), "exec"), space)
        numbers.append(space["number"])
        del space
        gc.collect()
    assert len(set(numbers)) == 29
    assert [frames[0][1] for frames in sites(journal)] == list(range(2, 31))
