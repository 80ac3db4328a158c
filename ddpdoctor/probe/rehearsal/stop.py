"""How a rehearsal ends inside a rank: as if the script had called ``sys.exit(0)``, at the next hook."""

from __future__ import annotations

import os
import sys
import threading
import time

from ..journal import Journal
from ..process import ProcessEnd

SWALLOWED_AT_MOST = 3
"""How often the user's code may catch the ending before the process is left for good."""

OVERDUE_S = 10.0
"""So long after its time a rank is left that reaches no hook: an evaluation by hand, a model that draws pictures. One
that is stuck, or that others wait for in vain, is proved within the five seconds of ``--stall-after``."""


class RehearsalEnded(SystemExit):
    """Raised in the user's code; exit code 0, so that ``finally`` runs and ``mp.spawn`` is content."""

    def __init__(self) -> None:
        super().__init__(0)


class Ending:
    """The decision when the rank has rehearsed enough, and its way out of the script."""

    def __init__(self, journal: Journal, process_end: ProcessEnd) -> None:
        self._journal = journal
        self._process_end = process_end
        self._deadline_s = float("inf")
        self._reason = ""
        self._raised = 0

    def in_seconds(self, seconds: float) -> None:
        """End at the first hook that is reached after so many seconds from now, in place of any earlier such time."""
        self._deadline_s = time.monotonic() + seconds

    def check(self) -> None:
        """Raise ``RehearsalEnded`` when the rehearsal is over; called by every hook."""
        if self._reason or time.monotonic() > self._deadline_s:
            self.end(self._reason or "time")

    def end_overdue(self, *, waits: bool) -> None:
        """Leave a script that works on without a hook; not where it ``waits`` for a rank. Called by the heartbeat."""
        if not waits and time.monotonic() > self._deadline_s + OVERDUE_S:
            self.end(self._reason or "time")

    def end(self, reason: str, text: str = "") -> None:
        """Note the ending, with a sentence where the rehearsal has shown too little, and leave the user's code."""
        if not self._reason:
            self._reason = reason
            self._process_end.ended_by_rehearsal = True
            self._journal.event("ended", reason=reason, text=text)
        self._raised += 1
        if threading.current_thread() is threading.main_thread() and self._raised <= SWALLOWED_AT_MOST:
            raise RehearsalEnded
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                pass
        os._exit(0)
