"""Which lines of the user's files a rank runs, each noted once.

From Python 3.12 on the interpreter reports a line and then never again, which costs nothing afterwards. Before that a
trace function makes all of Python slower while it is set (a small step 1.4 times, a bare loop 3 times): it is set for a
bounded time from where training begins. It gives way to any other tracer, and no worker process is traced.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, Callable, Optional

from ..journal import Journal
from ..user_code import outwards

PATIENCE = 100_000
"""A function that ran so many lines without a new one is watched no longer, and nothing is reported of it."""
TRACED_AT_MOST_S = 20.0
_TOOLS = (4, 3)
"""Tool numbers of the interpreter's that neither debuggers nor coverage nor profilers use."""

Tracer = Optional[Callable[[FrameType, str, Any], Any]]


class Lines:
    """The lines, which are written when they are new and ``flush`` is called."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._by_chance = False
        """Only the clock decides how far the script comes."""
        self._new: deque[tuple[str, int]] = deque()
        self._left: deque[tuple[str, int]] = deque()
        """First lines of functions that are watched no longer."""
        self._traced: dict[CodeType, TracedFunction] = {}
        self._tool = -1
        self._tracing = False
        self._until_s = 0.0
        self._begun = False

    def start_before_torch(self) -> None:
        """Watch from the user's first line on, where watching is free."""
        monitoring = getattr(sys, "monitoring", None)
        if monitoring is None:
            return
        for tool in _TOOLS:
            if monitoring.get_tool(tool) is None:
                monitoring.use_tool_id(tool, "ddpdoctor")
                self._tool = tool
                events = monitoring.events
                monitoring.register_callback(tool, events.PY_START, self._on_start)
                monitoring.register_callback(tool, events.LINE, self._on_line)
                monitoring.set_events(tool, events.PY_START)
                os.register_at_fork(after_in_child=self._stop)
                return

    def training_begins(self) -> None:
        """Watch from here on, as a model is wrapped or a loader drawn from, where watching is dear."""
        if self._begun:
            return
        self._begun = True
        if self._tool < 0:
            if hasattr(sys, "monitoring") or sys.gettrace() is not None:
                self._give_up("another tool traces the script")
                return
            self._trace()
        self._journal.event("lines_begun", late=self._tool < 0)

    def _trace(self) -> None:
        self._tracing, self._until_s = True, time.monotonic() + TRACED_AT_MOST_S
        for frame in outwards(sys._getframe()):
            frame.f_trace = self._on_call(frame, "call", None)
            if frame.f_trace is not None:
                frame.f_trace(frame, "line", None)  # the line that it is at
        sys.settrace(self._on_call)
        threading.settrace(self._on_call)
        os.register_at_fork(after_in_child=self._stop)

    def _give_up(self, reason: str) -> None:
        self._journal.event("lines_lost", reason=reason)

    def close(self) -> None:
        """Write what is new, as the process is about to end."""
        if self._tracing and threading.current_thread() is threading.main_thread() and sys.gettrace() != self._on_call:
            self._give_up("the script set a tracer of its own")
        self.flush()

    def flush(self) -> None:
        """Write what is new."""
        if self._journal.rank is None:
            return
        by_chance = self._by_chance
        files: dict[str, tuple[list[int], list[int]]] = {}
        for index, queue in enumerate((self._new, self._left)):
            for name, line in _taken(queue):
                files.setdefault(name, ([], []))[index].append(line)
        for name, (lines, left) in files.items():
            self._journal.event("lines", file=os.path.abspath(name), lines=lines, unwatched=left, by_chance=by_chance)

    def enough_rehearsed(self) -> None:
        """Note that from now on only the clock decides how far the script comes."""
        self.flush()
        self._by_chance = True

    def _stop(self) -> None:
        """Watch nothing in a forked child."""
        if self._tool >= 0:
            monitoring = sys.monitoring  # type: ignore[attr-defined]
            monitoring.set_events(self._tool, 0)
            for event in (monitoring.events.PY_START, monitoring.events.LINE):
                monitoring.register_callback(self._tool, event, None)
            monitoring.free_tool_id(self._tool)
            self._tool = -1
        if self._tracing:
            self._tracing = False
            sys.settrace(None)
            threading.settrace(None)

    def _give_up_tracing(self) -> None:
        if self._tracing:
            self._stop()
            self._give_up(f"lines were traced for {TRACED_AT_MOST_S:g} s only")

    def _on_start(self, code: CodeType, offset: int) -> Any:
        monitoring = sys.monitoring  # type: ignore[attr-defined]
        if self._is_users(code):
            monitoring.set_local_events(self._tool, code, monitoring.events.LINE)
        return monitoring.DISABLE

    def _on_line(self, code: CodeType, line: int) -> Any:
        self._new.append((code.co_filename, line))
        return sys.monitoring.DISABLE  # type: ignore[attr-defined]

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Tracer:
        if self._until_s and time.monotonic() > self._until_s:
            self._give_up_tracing()
            return None
        code = frame.f_code
        traced = self._traced.get(code)
        if traced is None:
            if not self._is_users(code):
                return None
            traced = self._traced.setdefault(code, TracedFunction(code))
        return None if traced.done else self._trace_of(traced)

    def _is_users(self, code: CodeType) -> bool:
        try:
            return self._journal.user_code.holds(code.co_filename)
        except Exception:  # what is raised here would be raised in the user's code
            return False

    def _trace_of(self, traced: TracedFunction) -> Tracer:
        if traced.trace is not None:
            return traced.trace
        unseen, new, left = traced.unseen, self._new, self._left

        def trace(frame: FrameType, event: str, argument: Any) -> Tracer:
            line = frame.f_lineno
            if line in unseen:
                unseen.discard(line)
                new.append((traced.file, line))
                traced.done = not unseen
            elif not traced.done:
                traced.idle += 1
                if traced.idle > PATIENCE:
                    traced.done = True
                    left.append((traced.file, traced.first_line))
            if traced.done:
                frame.f_trace_lines = False
            return trace

        traced.trace = trace
        return trace


class TracedFunction:
    """A function of the user's under the trace function."""

    def __init__(self, code: CodeType) -> None:
        self.file = code.co_filename
        self.first_line = code.co_firstlineno
        self.unseen = _lines_of(code)
        self.idle = 0
        self.done = not self.unseen
        self.trace: Tracer = None


def _taken(queue: deque[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield what is in a queue and empty it; another thread may take from it too."""
    while True:
        try:
            yield queue.popleft()
        except IndexError:
            return


def _lines_of(code: CodeType) -> set[int]:
    if hasattr(code, "co_lines"):
        return {line for _, _, line in code.co_lines() if line}
    import dis

    return {line for _, line in dis.findlinestarts(code)}
