"""In which phase the training thread is, and for how long it has been in each; one phase at a time.

Phases nest: a collective inside a forward stops the forward's time while it lasts. What is counted beside the times
(samples, bytes) stands in the same list, so that the whole tally of a step can be taken, set back and subtracted.
"""

from __future__ import annotations

import time

from ....record import layout

(STARTING, DATA_WAIT, FORWARD, BACKWARD, EXPLICIT, OPTIMIZER, EVALUATION, SAVING, OTHER, FINISHED) = range(
    len(layout.PHASES)
)
"""Positions in a tally: of the time in each phase …"""
(
    EXPLICIT_CALLS,
    EXPLICIT_BYTES,
    SAMPLES,
    BATCHES,
    MICRO_BATCHES,
    SYNCHRONISED,
    REDUCED_BYTES,
    BUCKETS,
    TALLIED,
) = range(len(layout.PHASES), len(layout.PHASES) + 9)
"""… and of what is counted."""


class Stopwatch:
    """The phases of one thread."""

    __slots__ = ("_outer", "phase", "since_ns", "tally")

    def __init__(self) -> None:
        self.tally = [0] * TALLIED
        self.phase = OTHER
        self.since_ns = time.monotonic_ns()
        self._outer: list[int] = []

    def enter(self, phase: int, now_ns: int) -> None:
        """Begin a phase inside of the current one."""
        self.tally[self.phase] += now_ns - self.since_ns
        self._outer.append(self.phase)
        self.phase = phase
        self.since_ns = now_ns

    def leave(self, now_ns: int) -> None:
        """End the current phase and go on with the one around it."""
        self.tally[self.phase] += now_ns - self.since_ns
        self.phase = self._outer.pop() if self._outer else OTHER
        self.since_ns = now_ns

    def settled(self, now_ns: int) -> list[int]:
        """Return the tally up to now, as a copy."""
        self.tally[self.phase] += now_ns - self.since_ns
        self.since_ns = now_ns
        return self.tally[:]

    def restart(self, now_ns: int) -> None:
        """Begin a new tally."""
        self.tally = [0] * TALLIED
        self.since_ns = now_ns

    def give_back(self, taken: list[int]) -> None:
        """Subtract what belongs to an earlier step."""
        self.tally = [value - other for value, other in zip(self.tally, taken)]

    def reset(self) -> None:
        """Forget phases that were left by an exception which no hook saw."""
        self._outer.clear()
        self.phase = OTHER
