"""A thread that writes, twenty times a second, that this rank lives and what its main thread waits in."""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Optional

from ..record import layout
from ..record.writer import CollectiveRing
from .endless_loops import EndlessLoops
from .journal import Journal
from .user_code import UserCode, all_frames

BEAT_S = 0.05
WAITING_AFTER_MS = 250
"""A main thread with an incomplete collective waits in it when its stack has not changed for this long …"""
WAITING_CPU_SHARE = 0.1
"""… and it used less than this share of a core meanwhile."""
SUPERVISOR_EVERY_BEATS = 10
_kept_open: list[object] = []


class ThreadWatch:
    """What one thread of this process does, by its stack and its CPU clock."""

    def __init__(self, thread: int, user_code: UserCode) -> None:
        """Watch the thread with this number in Python."""
        self.thread = thread
        self.stack: tuple[int, ...] = ()
        self.since_ns = 0
        """When the stack was first seen as it is; of the monotonic clock."""
        self.cpu_ns = 0
        """What the thread has computed at the last look."""
        self.unchanged_ms = 0
        """How long the stack had not changed at the last look."""
        self._cpu_at_change_ns = 0
        self._user_code = user_code
        self._clock = _clock_of(thread)

    def frame(self) -> Optional[FrameType]:
        """Return its innermost frame; None once it has ended."""
        return sys._current_frames().get(self.thread)

    def compute(self) -> None:
        """Read the CPU clock; of a thread that has ended, and where it has none, that of the process."""
        try:
            self.cpu_ns = time.process_time_ns() if self._clock is None else time.clock_gettime_ns(self._clock)
        except OSError:
            self.cpu_ns = time.process_time_ns()

    def look(self, frame: Optional[FrameType], now_ns: int) -> bool:
        """Take in its stack; return whether it does nothing, and not for a lock, a queue or a pipe of Python's."""
        stack = _places(frame)
        if stack != self.stack:
            self.stack, self.since_ns, self._cpu_at_change_ns = stack, now_ns, self.cpu_ns
        self.unchanged_ms = (now_ns - self.since_ns) // 1_000_000
        if frame is None or self._user_code.is_standard_library(frame.f_code.co_filename):
            return False
        return self.cpu_ns - self._cpu_at_change_ns <= WAITING_CPU_SHARE * self.unchanged_ms * 1_000_000


def _clock_of(thread: int) -> Optional[int]:
    try:
        return time.pthread_getcpuclockid(thread)
    except (AttributeError, OSError):
        return None


def _places(frame: Optional[FrameType]) -> tuple[int, ...]:
    places = []
    while frame is not None:
        places.append(id(frame.f_code))
        places.append(frame.f_lasti)
        frame = frame.f_back
    return tuple(places)


class Heartbeat:
    """A watch on the main thread of its own process."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        main = threading.main_thread().ident or 0
        self._main = ThreadWatch(main, journal.user_code)
        self._loops = EndlessLoops(journal, main)
        self._answered = 0

    def start(self) -> None:
        """Start the thread; it dies with the process."""
        register_for_stacks(self._journal.run_directory)
        threading.Thread(target=self._run, name="ddpdoctor-heartbeat", daemon=True).start()

    def _run(self) -> None:
        self._journal.event("pulse", thread=threading.get_native_id())
        beats = 0
        while self._journal.ring is not None:
            try:
                self._beat()
                beats += 1
                if beats % SUPERVISOR_EVERY_BEATS == 0:
                    self._end_with_the_supervisor()
                    self._journal.on_beat()
            except Exception as error:
                self._journal.event("probe_fault", where="heartbeat", text=repr(error), harms=["collectives"])
                return
            time.sleep(BEAT_S)

    def _beat(self) -> None:
        journal, ring = self._journal, self._journal.ring
        if ring is None:
            return
        waiting_row = journal.settle()
        main = self._main
        main.compute()
        frame, now_ns = main.frame(), time.monotonic_ns()
        is_blocked = main.look(frame, now_ns)
        journal.guarded(self._loops.look, frame, now_ns, harms=())
        if journal.sleeps_until_ns or not is_blocked or main.unchanged_ms < WAITING_AFTER_MS:
            waiting_row = -1
        journal.waits = waiting_row >= 0
        requested = ring.requested()
        if requested != self._answered:
            write_stacks(self._journal, main.thread)
            self._answered = requested
        ring.beat(
            main.cpu_ns,
            hash(main.stack),
            waiting_row,
            main.unchanged_ms,
            journal.forwards,
            journal.backwards,
            journal.optimizer_steps,
            self._answered,
            journal.sleeps_until_ns,
        )

    def _end_with_the_supervisor(self) -> None:
        """End the process when the monitor that started the rehearsal is gone."""
        if self._journal.plan.get("mount_points") is not None:
            return  # The box ends with its supervisor, whose number means nothing in it.
        supervisor = self._journal.plan.get("supervisor_pid")
        if not supervisor or self._journal.plan.get("kind") != "rehearsal":
            return
        try:
            os.kill(int(supervisor), 0)
        except ProcessLookupError:
            os._exit(1)
        except OSError:
            pass


def write_stacks(journal: Journal, main: int) -> None:
    """Write the stack of every thread but this one; ``main`` is the one that trains."""
    threads = threading.enumerate()
    names = {thread.ident: thread.name for thread in threads}
    lasting = {thread.ident for thread in threads if not thread.daemon}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            journal.event(
                "stack",
                thread=names.get(ident, str(ident)),
                main=ident == main,
                daemon=ident not in lasting,
                frames=all_frames(frame),
            )


def log_as_rank(journal: Journal, rank: int) -> bool:
    """Log the collectives of this process from now on, and start its heartbeat; False where no ring can be made."""
    journal.rank = rank
    if journal.ring is None:
        try:
            journal.ring = CollectiveRing(journal.run_directory)
        except OSError as error:
            journal.event("probe_fault", where="ring", text=repr(error), harms=["collectives"])
            return False
        Heartbeat(journal).start()
    return True


def register_for_stacks(run_directory: str) -> None:
    """Write the stacks at a signal of the supervisor, even when a C call holds the interpreter lock."""
    path = os.path.join(run_directory, layout.STACKS_FILE.format(os.getpid()))
    try:
        if signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL:
            return  # The script has a use for it.
        file = open(path, "wb", buffering=0)  # noqa: SIM115 - stays open for the signal handler
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)
        _kept_open.append(file)
        for owner, name in ((signal, "signal"), (faulthandler, "register"), (faulthandler, "unregister")):
            setattr(owner, name, _giving_back(getattr(owner, name), run_directory))
    except (OSError, ValueError, AttributeError):
        pass


def _giving_back(function: Callable[..., Any], run_directory: str) -> Callable[..., Any]:
    """Return a function that sets a signal's handler; for ours it first removes the file that permits it.

    Not at the next beat: a C call that holds the interpreter may come first, and then the signal is sent. Nor is
    ``getsignal`` enough, which hides faulthandler's handler: a script that restores it sets the default, which kills.
    """

    @functools.wraps(function)
    def giving_back(*arguments: Any, **options: Any) -> Any:
        number = arguments[0] if arguments else options.get("signum", options.get("signalnum"))
        if number == signal.SIGUSR2:
            _take_licence_away(run_directory)
        return function(*arguments, **options)

    return giving_back


def _take_licence_away(run_directory: str) -> None:
    try:
        os.unlink(os.path.join(run_directory, layout.STACKS_FILE.format(os.getpid())))
    except OSError:
        pass


def give_back_the_signal(run_directory: str) -> None:
    """Remove the file that permits the signal once the script has a use of its own for it."""
    if signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL and _kept_open:
        _take_licence_away(run_directory)


def write_crash_dumps(run_directory: str) -> None:
    """Write the signal of a crash, and the stack of every thread, to a file; not where the script has a use for that.

    Of a SIGTERM, with which a launcher ends the peers of a dead rank at once, write where the main thread was; it then
    ends the process as before. Only the interrupted thread is dumped: running ones cannot be read without a risk.
    """
    try:
        if faulthandler.is_enabled():
            return
        path = os.path.join(run_directory, layout.CRASH_DUMP_FILE.format(os.getpid()))
        file = open(path, "wb", buffering=0)  # noqa: SIM115 - stays open for the signal handler
        faulthandler.enable(file=file, all_threads=True)
        _kept_open.append(file)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            faulthandler.register(signal.SIGTERM, file=file, all_threads=False, chain=True)
    except (OSError, ValueError, AttributeError, RuntimeError):
        pass
