"""The life of a process: its start, its end, its parent's."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from os import getpid
from types import FrameType, TracebackType
from typing import Any, NoReturn, Optional

from .environment import number_in
from .journal import Journal
from .user_code import outwards

SET_PARENT_DEATH_SIGNAL = 1
SET_CHILD_SUBREAPER, GET_CHILD_SUBREAPER = 36, 37


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` dies, where it can: on Linux.

    For a process that its parent's main thread started: the signal comes when the thread that started it ends.
    """
    if process_control(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL) and os.getppid() != parent:
        os._exit(1)  # It died before this call.


def process_control(option: int, value: Any) -> bool:
    """Call ``prctl``; return whether there is such a function, as on Linux."""
    try:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except (OSError, AttributeError):
        return False
    return True


RANK_PROCESS_VARIABLE = "DDPDOCTOR_RANK_PROCESS"
"""Process id of the rank; its children inherit the variable and see by it that they are not the rank."""

_OF_ITS_OWN_CLOCK = frozenset({signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGCHLD})
"""Signals that a script sends to itself; the last one reports a child."""
_MOST_CHAINED = 50
_TAKES_MORE = 0x04
"""A function with ``*arguments``, as in ``inspect``, which takes milliseconds to import."""
_FORKED_PROCESS = os.path.join("multiprocessing", "popen_fork.py")
"""Its processes leave by ``os._exit`` when their function has returned."""

_PEER_LEFT = re.compile(
    r"connection (closed|reset) by peer|broken pipe|connection refused|socket.*(closed|timeout)|"
    r"gloo/transport|timed out waiting|recv.*timeout|remote process exited|nccl.*(abort|remote)|"
    r"detected mismatch between collectives",
    re.IGNORECASE,
)


def rank_of_environment() -> Optional[int]:
    """Return the rank that the launcher gave this process; None in its children and outside a launcher."""
    rank = number_in("RANK")
    if rank is None:
        return None
    owner = os.environ.setdefault(RANK_PROCESS_VARIABLE, str(getpid()))
    return rank if owner == str(getpid()) else None


def owner_of_environment() -> int:
    """Return the process of the rank that has started this one, however many programs lie between; 0 for none."""
    owner = number_in(RANK_PROCESS_VARIABLE)
    return owner if owner is not None and owner != getpid() else 0


def flush_output() -> None:
    """Write out what the process has said, before it leaves without the interpreter's own end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass


class ProcessEnd:
    """Hooks of the ways out of a process."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._pid = getpid()
        self._exit_code: Any = None
        self._activity_at_exit: tuple[int, ...] = ()
        self._reported: set[int] = set()
        self.before_report: Callable[[], None] = lambda: None
        """Called before it is written how the process ends; not in a live run, where the launcher ends the peers of a
        dead rank within 0.1 s."""
        self.after_report: Callable[[], None] = lambda: None
        """Called after that: what may take longer."""
        self.after_raising: Callable[[BaseException], None] = lambda error: None
        """Called after it is written which exception ends the process."""
        self.before_counting: Callable[[], None] = lambda: None
        """Called before it is looked up how much has been trained."""
        self.before_os_exit: Callable[[], None] = lambda: None
        """Called before the script leaves by ``os._exit``."""
        self.consequence: Callable[[BaseException], str] = lambda error: ""
        """Names what a cut of ours has to do with an exception; empty when it is a fault of the script."""
        self.owner_of_attribute: Callable[[BaseException], str] = lambda error: ""
        """Names the class of an attribute that was read from the DDP object around it and raised the exception."""
        self.leave: Callable[[int], NoReturn] = os._exit
        """Leaves the process at once; in the place of ``os._exit`` stands a function that notes it."""
        self.trains_here: Callable[[], bool] = lambda: False
        """Returns whether the calling thread is the one that is measured."""
        self.ended_by_rehearsal = False
        """Set when the ending is ours; nothing after it is evidence."""

    def install(self) -> None:
        """Take the places of ``sys.exit``, ``sys.excepthook`` and ``os._exit``, and be last at exit."""
        self._pid = getpid()
        atexit.register(self._at_exit)
        self._hook_exceptions()
        self._hook_exits()

    def belongs_here(self) -> None:
        """Report the end of this process, a rank that was perhaps forked off where the hooks were installed."""
        self._pid = getpid()

    def report(self, error: BaseException, *, of_a_thread: bool = False) -> None:
        """Write an exception that ends the rank, once; one that ends a thread is one only if the process ends."""
        if id(error) in self._reported or self.ended_by_rehearsal:
            return
        self._reported.add(id(error))
        self._close(self.before_report)
        self._write_error(error, of_a_thread=of_a_thread)
        self._close(self.after_report)
        if not self.ended_by_rehearsal:
            self._journal.guarded(self.after_raising, error, harms=())

    def _write_error(self, error: BaseException, *, of_a_thread: bool) -> None:
        consequence = self.consequence(error)
        if consequence:
            self.ended_by_rehearsal = True
            self._journal.event(
                "ended",
                reason=consequence,
                type=type(error).__name__,
                text=text_of(error)[:4000],
                frames=self._frames_of(error),
            )
            return
        message = text_of(error)
        self._journal.event(
            "raised",
            type=type(error).__name__,
            message=_both_ends(message),
            frames=self._frames_of(error),
            traceback=_trace_of(error)[-16000:],
            communication=is_echo(message),
            attribute_owner=self._journal.guarded(self.owner_of_attribute, error, harms=()) or "",
            of_a_thread=of_a_thread,
            by_signal=self._journal.guarded(_signal_below, error, harms=()) or 0,
        )

    def _hook_exceptions(self) -> None:
        previous = sys.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, trace: Optional[TracebackType]) -> None:
            if getpid() == self._pid:
                self._journal.guarded(self.report, error, harms=("ranks",))
            previous(kind, error, trace)

        sys.excepthook = excepthook
        previous_of_threads = threading.excepthook

        def excepthook_of_threads(ended: Any, /) -> None:
            if getpid() == self._pid and isinstance(ended.exc_value, Exception) and self.trains_here():
                self._journal.guarded(lambda: self.report(ended.exc_value, of_a_thread=True), harms=("ranks",))
            previous_of_threads(ended)

        threading.excepthook = excepthook_of_threads

    def _hook_exits(self) -> None:
        leave = self.leave

        def exit(code: Any = None, /) -> NoReturn:  # noqa: A001 - takes the place of sys.exit
            if _ends_the_process():
                self._exit_code = code
                self._activity_at_exit = self._activity()
            if getpid() == self._pid:
                handled = sys.exc_info()[1]
                if isinstance(handled, Exception) and code not in (None, 0):
                    self._journal.guarded(self.report, handled, harms=("ranks",))
            raise SystemExit(code) if code is not None else SystemExit

        def _exit(status: int) -> NoReturn:
            if getpid() == self._pid and self._journal.rank is not None:
                self._journal.guarded(self._note_os_exit, status, harms=("ranks",))
                self._journal.guarded(self.before_os_exit)
            leave(status)

        sys.exit = exit
        os._exit = _exit

    def _note_os_exit(self, status: int) -> None:
        """Write that the process leaves by ``os._exit``, and from where; as an exit handler no frame calls it."""
        try:
            caller = sys._getframe(3)
        except ValueError:
            caller = None
        if caller is not None and caller.f_code.co_filename.endswith(_FORKED_PROCESS):
            self._journal.event("exit", code=status, finished=status == 0)
            return
        site = None if caller is None else self._journal.guarded(self._journal.site, caller, harms=())
        self._journal.event("os_exit", code=status, site=-1 if site is None else site)

    def _at_exit(self) -> None:
        """Note, as the last exit handler, that the script is over, and leave before the teardown can abort."""
        if getpid() != self._pid:
            return
        self._close(self.before_report)
        error = getattr(sys, "last_value", None)
        if isinstance(error, BaseException):
            self._journal.guarded(self.report, error, harms=("ranks",))
            code = 1
        else:
            code = self._code_of_exit()
        self._journal.event("exit", code=code, finished=code == 0 and error is None)
        self._close(self.after_report)
        if self._journal.rank is not None and self._journal.plan.get("kind") == "rehearsal":
            flush_output()
            self.leave(code)

    def _close(self, part: Callable[[], None]) -> None:
        try:
            part()
        except Exception as error:
            self._journal.event("probe_fault", where="exit", text=repr(error), harms=["missing_gradients"])

    def _code_of_exit(self) -> int:
        """Return the code of the ``sys.exit`` that ended the process; 0 when none did."""
        if self._exit_code is None or self._activity() != self._activity_at_exit:
            return 0
        return self._exit_code & 0xFF if isinstance(self._exit_code, int) else 1

    def _activity(self) -> tuple[int, ...]:
        """Return what training has been done; a script that trains on after ``sys.exit`` has caught it."""
        journal = self._journal
        journal.guarded(self.before_counting, harms=("step_tracks",))
        collectives = journal.ring.count if journal.ring is not None else 0
        return journal.forwards, journal.backwards, journal.optimizer_steps, collectives

    def _frames_of(self, error: BaseException) -> list[tuple[str, int, str]]:
        """Return the user's lines, innermost first; of a file that cannot be compiled the wrong line."""
        frames = self._journal.user_code.raised_frames(error.__traceback__)
        if isinstance(error, SyntaxError) and error.filename and self._journal.user_code.holds(error.filename):
            frames.insert(0, (os.path.abspath(error.filename), error.lineno or 1, "<module>"))
        return frames


def _ends_the_process() -> bool:
    """Return whether an exception from here leaves the script: from a thread or an exit handler it goes nowhere."""
    *_, outermost = outwards(sys._getframe(1))
    return outermost.f_code.co_name == "<module>"


def _signal_below(error: BaseException) -> int:
    """Return the signal whose handler raised an exception or one before it; 0 for none, and for a timer's."""
    left: list[Optional[BaseException]] = [error]
    for known in left:
        for frame, _ in traceback.walk_tb(None if known is None else known.__traceback__):
            number = _handled_by(frame)
            if number and number not in _OF_ITS_OWN_CLOCK:
                return number
        if known is not None and len(left) < _MOST_CHAINED:
            left += (known.__cause__, known.__context__)
    return 0


def _handled_by(frame: FrameType) -> int:
    """Return the signal that a function handles: its arguments are the number and the interrupted frame."""
    if frame.f_back is None:
        return 0
    code, values = frame.f_code, frame.f_locals
    given = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & _TAKES_MORE:
        more = values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
        given += more if isinstance(more, tuple) else ()
    for number, interrupted in zip(given, given[1:]):
        if interrupted is frame.f_back and isinstance(number, int):
            return int(number)
    return 0


def is_echo(message: str) -> bool:
    """Return whether an exception only means that a peer has left."""
    return bool(_PEER_LEFT.search(_both_ends(message)))


def text_of(error: BaseException) -> str:
    """Return the text of an exception, or that it has none: a ``__str__`` of the user's may raise, or give no text."""
    try:
        return str(error)
    except BaseException as fault:
        return f"<its __str__ raised {type(fault).__name__}>"


def _trace_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException:
        return "".join(traceback.format_tb(error.__traceback__))


def _both_ends(message: str) -> str:
    """Shorten a message in its middle: what a loader's worker raised stands behind the worker's traceback."""
    return message if len(message) <= 4000 else f"{message[:2000]}\n...\n{message[-2000:]}"
