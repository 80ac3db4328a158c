"""Keeps a rank that fails until the others have shown whether they fail alike.

A launcher ends the other ranks as soon as it sees that one has failed: ``mp.spawn`` at once, torch's after 0.1 s. What
they would have done is then unknown: wait for it, which is a hang that its failure brings about, or fail at the same
line a moment later, which is a plain bug. On a machine that lags, 2 of 6 rehearsals of a spawned worker that raises
ended before the other had come to its collective.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import monotonic, sleep  # As they are before a rehearsal follows what sleeps.

from ...journal import Journal

STAYS_S = 3.0
"""At most; well under the five seconds after which a rehearsal ends that a failed rank has not brought to its end."""
LOOK_EVERY_S = 0.02
_FAILED = "failed-"


class Failure:
    """A delay of the end of a process that an exception ends."""

    def __init__(self, journal: Journal, started: Callable[[], int]) -> None:
        """Delay ends where ``started`` returns how many processes were started as ranks, 0 where that is not known."""
        self._journal = journal
        self._started = started

    def stay(self, error: BaseException) -> None:
        """Return once as many processes have failed as were started, or after ``STAYS_S``."""
        journal, expected = self._journal, self._started()
        of_the_script = isinstance(error, Exception) and threading.current_thread() is threading.main_thread()
        if expected < 2 or not journal.may_be_rank or not of_the_script:
            return
        with open(os.path.join(journal.run_directory, f"{_FAILED}{os.getpid()}"), "w"):
            pass
        ends_s = monotonic() + STAYS_S
        while self._failed() < expected and monotonic() < ends_s:
            sleep(LOOK_EVERY_S)

    def _failed(self) -> int:
        return sum(name.startswith(_FAILED) for name in os.listdir(self._journal.run_directory))
