"""The rows: what is sent to the processes, and what happens to the terminal and the streams."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tests.monitor_faults.jobs import JOBS
from tests.monitor_faults.play import Row, Running
from tests.monitor_faults.worlds import WORLDS

Act = Callable[[Running], None]
_QUIET = "sys.stdout = None"
"""The job prints nothing: what becomes of its own writes is not in question."""


def send(who: str, *numbers: int, asks: bool = True, at_start: float = 0.2) -> Act:
    """Send signals to a process at a random moment; ``asks``: they ask the job to end."""

    def act(running: Running) -> None:
        if at_start == 0 or running.watched:
            running.pid_of("launcher")
        running.reach(at_start)
        running.signal(who, *numbers)
        if asks:
            running.asked_s = time.time()

    return act


def stop(who: str, least_s: float, most_s: float) -> Act:
    """Stop a process for a while."""

    def act(running: Running) -> None:
        running.reach()
        running.signal(who, signal.SIGSTOP)
        time.sleep(running.chance.uniform(least_s, most_s))
        running.signal(who, signal.SIGCONT)
        if running.terminal is not None:
            bring_back(running)  # The shell has taken the terminal back.

    return act


def bring_back(running: Running) -> None:
    """Type ``fg`` as often as it takes.

    Continued in the background, Textual's thread that reads and the one that writes are each told to stop, and the
    second heeds it only after the first ``fg``.
    """
    assert running.terminal is not None
    monitor = running.pid_of("monitor")
    for _ in range(3):
        running.terminal.send("fg\n")
        time.sleep(2.0)
        if running.status(monitor) != "stopped":
            return


def stop_to_the_end(running: Running) -> None:
    """Stop the monitor until the training is over."""
    running.reach()
    running.signal("monitor", signal.SIGSTOP)
    running.wait(lambda: len(running.digests()) == running.row.ranks, "the training")
    time.sleep(1.0)
    running.asked_s = time.time()
    running.signal("monitor", signal.SIGCONT)


def twice(number: int) -> Act:
    """Send a signal that asks to end, and again after the time in which that counts as one."""

    def act(running: Running) -> None:
        running.pid_of("launcher")
        running.reach(0)
        for pause_s in (2.5, 0.0):
            running.signal("monitor", number)
            running.asked_s = time.time()
            time.sleep(pause_s if running.watched else 0.0)

    return act


def keys(text: str, *, times: int = 1, asks: bool = True) -> Act:
    """Press keys at a random moment."""

    def act(running: Running) -> None:
        assert running.terminal is not None
        running.pid_of("launcher")
        running.reach(0)
        for _ in range(times):
            running.terminal.send(text)
            time.sleep(0.1)
        if asks:
            running.asked_s = time.time()

    return act


def suspend(running: Running) -> None:
    """Press Ctrl-Z, and bring the command back after a while."""
    assert running.terminal is not None
    running.pid_of("launcher")
    running.reach(0)
    monitor = running.pid_of("monitor")
    running.terminal.send("\x1a")
    running.wait(lambda: running.status(monitor) == "stopped", "the stop")
    time.sleep(running.chance.uniform(0.2, 3.0))
    running.terminal.send("fg\n")


def hang_up(running: Running) -> None:
    """Close the terminal."""
    running.pid_of("launcher")
    running.reach(0)
    running.hang_up()
    running.asked_s = time.time()


def resize(running: Running) -> None:
    """Give the terminal a thousand sizes."""
    assert running.terminal is not None
    running.pid_of("launcher")
    running.reach(0)
    for _ in range(1_000):
        running.terminal.resize(running.chance.randrange(1, 300), running.chance.randrange(1, 100))
        time.sleep(0.001)
    running.terminal.resize(100, 30)


def tell_of_a_size(running: Running) -> None:
    """Tell the monitor a thousand times that the terminal has another size."""
    running.pid_of("launcher")
    running.reach(0)
    for _ in range(1_000):
        running.signal("monitor", signal.SIGWINCH)


def read_late(running: Running) -> None:
    """Hold a full pipe in the place of stderr, and read it once the training is over."""
    running.wait((running.out / "pipe").exists, "the pipe")
    descriptor = os.open(running.out / "pipe", os.O_RDWR | os.O_NONBLOCK)
    size = fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, 4096)
    os.write(descriptor, b"\n" * size)
    running.wait(lambda: len(running.digests()) == running.row.ranks, "the training")
    running.asked_s = time.time()
    text = b""
    while running.process.poll() is None:
        try:
            text += os.read(descriptor, 65_536)
        except BlockingIOError:
            time.sleep(0.01)
    (running.folder / "seen/stderr").write_bytes(text)


_ENDED = Row(name="", bare="likewise", trains="may end", verdicts=("HEALTHY", "SLOW", "UNKNOWN", "BROKEN"))


def _ended(name: str, act: Act, **more: Any) -> Row:
    """A row whose job is asked to end."""
    return msgspec.structs.replace(_ENDED, name=name, act=act, **more)


SIGNALS = (
    Row(name="nothing"),
    Row(name="nothing, with the screen", screen="screen"),
    Row(name="nothing, plain lines in a terminal", screen="plain"),
    Row(name="SIGSTOP and SIGCONT of the monitor", act=stop("monitor", 0.5, 3.0)),
    Row(name="SIGSTOP of the monitor until the training is over", act=stop_to_the_end),
    Row(name="SIGSTOP and SIGCONT of the monitor, with the screen", act=stop("monitor", 0.5, 3.0), screen="screen"),
    Row(name="SIGSTOP and SIGCONT of a rank", act=stop("rank 1", 0.5, 6.0)),
    Row(name="SIGSTOP and SIGCONT of the launcher", act=stop("launcher", 0.5, 6.0)),
    _ended("kill -9 of a rank", send("rank 1", signal.SIGKILL), verdicts=("BROKEN",), says="rank 1|exit code 1",
           runs=20),
    _ended("kill -9 of the launcher", send("launcher", signal.SIGKILL), runs=20),
    Row(
        name="kill -9 of the monitor",
        act=send("monitor", signal.SIGKILL, asks=False),
        launcher="shell",
        answers_nobody=True,
        runs=20,
    ),
    _ended("kill -9 of the monitor, with the screen", send("monitor", signal.SIGKILL), screen="screen", trains="on",
           bare="undisturbed", answers_nobody=True),
    *(
        _ended(f"{signal.Signals(number).name} of the monitor", send("monitor", number, at_start=0))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    ),
    _ended("SIGTERM of the monitor, twice", twice(signal.SIGTERM), answers_nobody=True),
    _ended("SIGUSR1 of the monitor", send("monitor", signal.SIGUSR1, asks=False), bare="undisturbed", trains="on"),
    _ended("Ctrl-C", keys("\x03"), screen="plain"),
    _ended("Ctrl-C twice", keys("\x03", times=2), screen="plain"),
    _ended("Ctrl-\\", keys("\x1c"), screen="plain"),
    _ended("q and y on the screen", keys("qy"), screen="screen", answers_nobody=True),
    Row(name="Ctrl-Z and fg", act=suspend, screen="plain"),
    Row(name="Ctrl-Z and fg, with the screen", act=suspend, screen="screen"),
    _ended("the terminal is closed", hang_up, screen="plain", answers_nobody=True),
    _ended("the terminal is closed, with the screen", hang_up, screen="screen", answers_nobody=True),
    Row(name="a thousand sizes of the terminal", act=resize, screen="screen"),
    Row(name="a thousand SIGWINCH", act=tell_of_a_size),
    Row(name="a terminal without columns", screen="screen", variables={"COLUMNS": "1", "LINES": "1"}),
    Row(name="TERM=dumb", screen="screen", variables={"TERM": "dumb"}),
    Row(name="stdin is closed", streams="<&-"),
    Row(name="stdout is closed", streams=">&-", first=_QUIET, bare="likewise"),
    Row(name="stderr is closed", streams="2>&-", verdicts=()),
    Row(name="all streams are closed", streams="<&- >&- 2>&-", first=_QUIET, bare="likewise", verdicts=()),
    Row(name="stdout is full", streams="> /dev/full", first=_QUIET, bare="likewise"),
    Row(name="stderr is full", streams="2> /dev/full", verdicts=()),
    Row(name="JSON on a full stdout", streams="> /dev/full", first=_QUIET, bare="likewise",
        profile=("--output-format", "json"),
        verdicts=(), says="cannot write to the standard output"),
    Row(name="stderr is read by head -1", streams="2> >(head -1 > $OUT/head)", verdicts=()),
    Row(name="stdout and stderr are read by head -1", streams="2>&1 | head -1 > $OUT/head", bare="likewise",
        first=_QUIET, verdicts=()),
    Row(name="stderr is a pipe that nobody reads", before='mkfifo "$OUT/pipe"', streams='2> "$OUT/pipe"',
        act=read_late),
)  # fmt: skip

ROWS = (*SIGNALS, *WORLDS, *JOBS)
