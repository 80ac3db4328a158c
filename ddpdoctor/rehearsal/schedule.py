"""How much of the script is rehearsed: how many batches a pass yields, and when it is enough."""

from __future__ import annotations

from ..probe.journal import Journal
from .ending import Ending

TRAINING_PASSES = 2
"""So many passes with a backward in them are rehearsed; later ones yield one batch."""
STEPS_PER_PASS = 2
"""A training pass goes on until so many optimizer steps were made in it …"""
MOST_BATCHES = 64
"""… or it has yielded this many batches."""
AFTERWARDS_S = 10.0
"""Time for the rest of the script once the training passes were rehearsed."""
STEPS_WITHOUT_LOADER = 8
"""Optimizer steps outside of every pass after which a script without an end is ended."""


class Schedule:
    """Counts what the rank has done so far."""

    def __init__(self, journal: Journal, ending: Ending, batches: int) -> None:
        self._journal = journal
        self._ending = ending
        self._batches = batches
        self._training_passes = 0
        self.open_passes = 0
        """Passes that were begun and not ended."""
        self._steps_outside: dict[int, int] = {}

    def batches(self, backwards: int, optimizer_steps: int) -> int:
        """How many batches a pass yields that has seen so many backwards and optimizer steps so far."""
        if self._training_passes >= TRAINING_PASSES:
            return 1
        if backwards and optimizer_steps < STEPS_PER_PASS:
            return max(MOST_BATCHES, self._batches)
        return self._batches

    def pass_ended(self, backwards: int) -> None:
        """A pass is over, with so many backwards in it."""
        self.open_passes -= 1
        if backwards:
            self._training_passes += 1
            if self._training_passes == TRAINING_PASSES:
                self._ending.not_after(AFTERWARDS_S)

    def optimizer_stepped(self, optimizer: int) -> None:
        """An optimizer has stepped; ends the rehearsal of a training loop that draws from no loader."""
        if self.open_passes > 0:
            return
        steps = self._steps_outside[optimizer] = self._steps_outside.get(optimizer, 0) + 1
        if steps >= STEPS_WITHOUT_LOADER:
            self._ending.end("steps")
