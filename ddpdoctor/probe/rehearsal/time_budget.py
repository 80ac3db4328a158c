"""The end of a rehearsal with steps that are too slow for its time limit, instead of running into it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Optional

from .stop import Ending

CERTAIN_SHARE = 0.5
"""The first step may take this much longer than later ones: so much of its time is believed."""


class Pace:
    """What the newest pass still has to do, compared with the time that is left."""

    def __init__(
        self, ending: Ending, started_s: float, limit_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._ending = ending
        self._started_s = started_s
        self._limit_s = limit_s
        self._clock = clock
        self._backwards = 0
        self._begun_s: Optional[float] = None
        self._fastest_s = 0.0
        """The least time between two backwards."""

    def forward_begins(self) -> None:
        """Begin a training forward; the first one starts the watch."""
        if self._begun_s is None:
            self._begun_s = self._clock()

    def backward_ended(self) -> None:
        """Count a backward."""
        now = self._clock()
        if self._begun_s is not None:
            taken = now - self._begun_s
            if self._backwards == 0:
                self._fastest_s = taken * CERTAIN_SHARE
            else:
                self._fastest_s = taken if self._backwards == 1 else min(self._fastest_s, taken)
            self._backwards += 1
        self._begun_s = now

    def stepped(self, batches_left: float) -> None:
        """Count a step with so many batches left; end the rehearsal when they take too long."""
        spent = self._clock() - self._started_s
        if batches_left and spent + batches_left * self._fastest_s > self._limit_s:
            taken = self._fastest_s / (CERTAIN_SHARE if self._backwards == 1 else 1.0)
            self._ending.end(
                "slow",
                f"a batch takes {taken:.1f} s, so {batches_left:.0f} more do not fit into the time limit"
                f" of {self._limit_s:g} s",
            )
