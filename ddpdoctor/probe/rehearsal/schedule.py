"""How much of the script is rehearsed: how many batches a pass yields, and when it is enough.

Every number that shapes a pass follows from what the rank itself did before, never from a clock: ranks that do the same
are cut at the same batch.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Optional

from ..journal import Journal
from ..process import ProcessEnd, flush_output

# How a rehearsal ends inside a rank: as if the script had called `sys.exit(0)`, at the next hook.

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
        flush_output()
        os._exit(0)


TRAINING_PASSES = 2
"""So many training passes of a loader are rehearsed; afterwards passes yield the batches of one step."""
RESUMED_PASSES = 12
"""The same where checkpoints are awaited, which a script may write every few epochs."""
STEPS_PER_PASS = 2
"""A training pass goes on until so many optimizer steps were made in it …"""
MOST_BATCHES = 64
"""… or it has yielded this many batches."""
WHOLE = 4
"""A pass whose batches the script counts is not cut where it has so many times the batches of a short one."""
AFTERWARDS_S = 10.0
"""Time for the rest of the script once the training passes were rehearsed."""
STEPS_WITHOUT_LOADER = 8
"""Optimizer steps since the newest batch after which a training loop draws from no loader, and is ended …"""
RESUMED_STEPS = 400
"""… or, where checkpoints are awaited, so many …"""
STEPS_ON_ONE_BATCH = 64
"""… and the same while a pass is open, whose batches may serve many steps each."""


class ReadLength(NamedTuple):
    """The length of a pass that the script has read."""

    length: int = 0
    turns: bool = False
    """A loop draws so often by itself, on this rank's decision alone."""


class Place:
    """Where a loader is made and drawn from: passes at one place are epochs of the same loop."""

    def __init__(self) -> None:
        self.passes = 0
        self.training_passes = 0
        self.counted_at = -1
        """When the newest training pass was counted; passes that were open then belong to the same epoch."""
        self.newest: Optional[Trail] = None
        self.batches_of_step = 1
        """At most, in the passes so far: code that accumulates may have no step without so many."""


class Trail:
    """What one pass has done so far."""

    def __init__(self, number: int, loader: int, place: Place, begun_at: int, main: bool) -> None:
        self.number = number
        self.loader = loader
        self.place = place
        self.begun_at = begun_at
        self.brief = False
        """It comes after what is rehearsed, and yields the batches of one step."""
        self.patient = False
        """The pass before it was too short to see optimizer steps."""
        self.draws_before = 0
        """Batches of any pass before it began: passes side by side begin together."""
        self.true = math.inf
        """Batches that it would yield if it were not cut."""
        self.main = main
        """The main thread draws, so that what training has done by a draw is the same in every run."""
        self.read_length = ReadLength()
        self.ordinal = 0
        """n-th pass over its loader, from 0."""
        self.looped = True
        """See ``Forward.looped``."""
        self.yielded = 0
        self.backwards = 0
        self.steps = 0
        self.is_counted: Optional[bool] = None
        """The script counts its batches and is not prepared for an end; None before it is known."""
        self.ended = False
        self.counted = False


class Schedule:
    """The counts of what the rank has done so far."""

    def __init__(
        self, ending: Ending, batches: int, full: bool = False, training_passes: int = TRAINING_PASSES
    ) -> None:
        self._ending = ending
        self._training_passes = training_passes
        self._batches = batches
        self._full = full
        self._moments = 0
        """Counts begins and ends of passes."""
        self._passes = 0
        self._places: dict[object, Place] = {}
        self._place_of: dict[int, Place] = {}
        """Where each loader was drawn from last."""
        self._read_lengths: dict[int, ReadLength] = {}
        """What was read ahead of the pass, which is good for later ones until it is read again."""
        self._open: dict[int, Trail] = {}
        self._draws = 0
        self._drawn: list[Trail] = []
        """Passes that were drawn from since the newest backward."""
        self._fed: list[Trail] = []
        """Passes whose batches are trained on; ended ones when they were fetched ahead or are used again."""
        self._steps_since_draw: dict[int, int] = {}
        self.on_pace: Callable[[float], None] = lambda batches: None
        """Called after each optimizer step with the number of batches that are left of what is trained on."""
        self.on_enough: Callable[[], None] = lambda: None
        """Called when what is rehearsed of a training loop was rehearsed."""

    def begin(self, loader: int, key: object, main: bool = True, true: Optional[int] = None) -> Trail:
        """Begin a pass; ``key`` is where its loader is made and drawn from, ``true`` how long it would be."""
        place = self._place_of[loader] = self._places.setdefault(key, Place())
        if place.newest is not None:
            # A script that counts its batches by itself never draws more from an iterator, and keeps it.
            self._count(place.newest)
        self._moments += 1
        self._passes += 1
        trail = Trail(self._passes, loader, place, self._moments, main)
        trail.brief, trail.patient = self._is_brief(place), _is_patient(place, main)
        trail.true = math.inf if true is None else true
        trail.draws_before = self._draws
        trail.read_length = self._read_lengths.get(loader, ReadLength())
        place.passes += 1
        place.newest = trail
        self._open[trail.number] = trail
        self._steps_since_draw.clear()
        return trail

    def is_over(self, trail: Trail) -> bool:
        """Return whether a pass has yielded what it may; called before each batch."""
        return trail.ended or trail.yielded >= self._limit(trail)

    def may_go_on(self, trail: Trail) -> bool:
        """Return whether a pass that was rehearsed enough may go on, as the script counts its batches itself."""
        if trail.brief:
            return False
        return trail.yielded < MOST_BATCHES if trail.steps < STEPS_PER_PASS else trail.true <= WHOLE * self._batches

    def drawn(self, trail: Trail) -> None:
        """Count a batch of the pass."""
        trail.yielded += 1
        self._draws += 1
        self._drawn.append(trail)
        self._steps_since_draw.clear()

    def end(self, trail: Trail) -> None:
        """End a pass."""
        self._moments += 1
        trail.ended = True
        self._open.pop(trail.number, None)
        self._count(trail)

    def backward_ended(self) -> Optional[Trail]:
        """Count a backward on the batches that were drawn last; return the pass of theirs that had already ended."""
        drawn, self._drawn = self._drawn, []
        if drawn:
            self._fed = _trained_on([trail for trail in drawn if not trail.ended] or drawn[-1:])
        late = None
        for trail in self._fed:
            trail.backwards += 1
            if trail.ended:
                late = trail
                self._count(trail)
        return late

    def optimizer_stepped(self, optimizer: int) -> None:
        """Count a step of an optimizer; end the rehearsal of a training loop that draws from no loader."""
        for trail in self._fed:
            trail.steps += 1
        if self._full:
            return
        steps = self._steps_since_draw[optimizer] = self._steps_since_draw.get(optimizer, 0) + 1
        feeding = [trail for trail in self._fed if not trail.ended]
        most = STEPS_WITHOUT_LOADER if self._training_passes <= TRAINING_PASSES else RESUMED_STEPS
        if steps >= (STEPS_ON_ONE_BATCH if feeding else most):
            self._ending.end("steps")
        self.on_pace(self._left_of(feeding[-1]) if feeding else min(STEPS_WITHOUT_LOADER, most - steps))

    def length(self, loader: int, true: int, *, turns: bool = False) -> int:
        """Return the length for a loop that ends by it; the pass will keep to it."""
        trail = next((trail for trail in list(self._open.values()) if trail.loader == loader), None)
        if trail is not None:
            planned = int(min(true, self._planned(trail.place, trail.brief, trail.patient)))
            trail.read_length = ReadLength(max(trail.read_length.length, planned), turns)
            return trail.read_length.length
        place = self._place_of.get(loader, Place())
        planned = int(min(true, self._planned(place, self._is_brief(place), _is_patient(place, True))))
        self._read_lengths[loader] = ReadLength(planned, turns)
        return planned

    def _planned(self, place: Place, brief: bool, patient: bool) -> float:
        if self._full:
            return math.inf
        if brief:
            return place.batches_of_step
        return max(MOST_BATCHES, self._batches) if patient else self._batches

    def _limit(self, trail: Trail) -> float:
        patient = trail.patient
        if trail.main:
            patient = (patient or trail.backwards > 0) and trail.steps < STEPS_PER_PASS
        return max(self._planned(trail.place, trail.brief, patient), trail.read_length.length)

    def _left_of(self, trail: Trail) -> float:
        """Return how many batches a pass that is trained on will still yield, as far as its steps so far show."""
        limit = max(self._planned(trail.place, trail.brief, False), trail.read_length.length)
        if trail.steps < STEPS_PER_PASS and not trail.brief:
            limit = max(limit, trail.yielded * STEPS_PER_PASS / max(1, trail.steps))
        return max(0.0, min(limit, trail.true) - trail.yielded)

    def _is_brief(self, place: Place) -> bool:
        if place.training_passes:
            return place.training_passes >= self._training_passes
        return place.passes > 0 and self._is_afterwards()

    def _is_afterwards(self) -> bool:
        return any(place.training_passes >= self._training_passes for place in list(self._places.values()))

    def _count(self, trail: Trail) -> None:
        """Count a training pass of its place, once, and not beside another one that was open at the same time."""
        if trail.counted or not (trail.backwards or trail.steps):
            return
        trail.counted = True
        place = trail.place
        if trail.steps:
            place.batches_of_step = min(self._batches, max(place.batches_of_step, -(-trail.yielded // trail.steps)))
        if trail.begun_at <= place.counted_at:
            return
        place.counted_at = self._moments
        place.training_passes += 1
        if place.training_passes <= self._training_passes and self._is_afterwards() and not self._full:
            self.on_enough()
            self._ending.in_seconds(AFTERWARDS_S)


def _is_patient(place: Place, main: bool) -> bool:
    """Return whether the pass before was trained on without enough optimizer steps."""
    previous = place.newest
    if previous is None or not previous.backwards or previous.steps >= STEPS_PER_PASS:
        return False
    # Another thread may fetch the next pass while this one is still trained on: its steps prove nothing yet.
    return main or previous.backwards >= previous.yielded


def _trained_on(drawn: list[Trail]) -> list[Trail]:
    """Return the pass that was drawn from last, and those beside it: begun with it and drawn from as often.

    What a validation in between drew is not trained on.
    """
    last = drawn[-1]
    beside = {trail.number: trail for trail in drawn if trail.draws_before == last.draws_before}
    return [trail for trail in beside.values() if drawn.count(trail) == drawn.count(last)]


# The end of a rehearsal with steps that are too slow for its time limit, instead of running into it.


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
            self._fastest_s = taken if self._backwards < 2 else min(self._fastest_s, taken)
            self._backwards += 1
        self._begun_s = now

    def stepped(self, batches_left: float) -> None:
        """Count a step with so many batches left; end the rehearsal when they take too long."""
        spent = self._clock() - self._started_s
        # A first step may import and compile for long (11 s of a model of 30,000 numbers, on a busy machine): the
        # second says what a step takes, where there is time for it.
        believed = batches_left
        if self._backwards == 1:
            believed, self._begun_s = min(batches_left, 1), self._clock()
        if batches_left and spent + believed * self._fastest_s > self._limit_s:
            self._ending.end(
                "slow",
                f"a batch takes {self._fastest_s:.1f} s, so {batches_left:.0f} more do not fit into the time limit"
                f" of {self._limit_s:g} s",
            )
