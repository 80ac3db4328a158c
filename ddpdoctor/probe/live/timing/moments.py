"""The moments that hooks note of the training thread, kept in order until a thread has the time to process them.

Between two hooks a training step drives all that is ours out of the processor's caches, and each function that runs
then takes microseconds instead of tenths of them. So a hook only keeps a moment, and many are processed one after the
other: by the heartbeat's thread, or by the training thread where it cannot wait for that.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Callable

Moment = tuple[Any, ...]
"""A function, and after it the arguments that it is called with when the moment is taken in: one object, not two."""
MOST_WAITING = 8_000
"""A fifth of a second of steps of 0.2 ms: only a loop of shorter steps makes more of them between two beats."""


class Moments:
    """A queue of calls: ``keep((function, argument, …))`` is what a hook pays for."""

    def __init__(self, fault: Callable[[str, Exception, tuple[str, ...]], None]) -> None:
        self._fault = fault
        self._waiting: deque[Moment] = deque()
        self.keep: Callable[[Moment], None] = self._waiting.append
        self.lock = threading.RLock()
        """Held by the thread that takes in, or looks at the result."""
        self._taking = False

    def take_in(self) -> None:
        """Make the calls that wait, in their order."""
        with self.lock:
            if self._taking:
                return  # A handler of a signal trains, too; what it has kept comes after what is being taken in.
            self._taking = True
            next_one = self._waiting.popleft
            try:
                for _ in range(len(self._waiting)):
                    moment = next_one()
                    try:
                        moment[0](*moment[1:])
                    except Exception as error:
                        self._fault(moment[0].__name__, error, ("call_tracks", "step_tracks"))
            finally:
                self._taking = False

    def make_room(self) -> None:
        """Take in if so much waits that the heartbeat's thread seems not to come to it."""
        if len(self._waiting) >= MOST_WAITING:
            self.take_in()

    def become_forked_child(self) -> None:
        """Replace the lock: the thread that holds it may not exist in a child."""
        self._waiting.clear()
        self.lock = threading.RLock()
        self._taking = False
