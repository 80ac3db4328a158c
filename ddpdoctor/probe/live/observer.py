"""The state that the hooks of a live run share, and the way they are kept from doing harm."""

from __future__ import annotations

import threading
from typing import Any, Callable, Optional

from ...record import layout
from ...record.ring_writer import Ring
from ..journal import Journal
from .timing.moments import Moments
from .timing.phases import Course
from .timing.steps import Steps
from .timing.stopwatch import Stopwatch

_NO_THREAD = -1
MOST_FAULTS = 3


class Observer:
    """What one rank holds of its own training."""

    __slots__ = (
        "_faults", "adopted", "backwards", "backwards_over", "course", "has_new_loader", "journal", "look_soon",
        "moments", "on_device", "step_ring", "steps", "thread", "watch",
    )  # fmt: skip

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.thread = _NO_THREAD
        """The training thread; none before there is a world, and when the probe has switched itself off."""
        self.watch = Stopwatch()
        self.steps = Steps(self.watch, self._put_step)
        self.course = Course(self.watch, self.steps, journal)
        self.moments = Moments(self.fault)
        """What the hooks have noted and ``course`` has not taken in."""
        self.backwards = 0
        """Backwards that are running; more than one when checkpointing recomputes inside of one."""
        self.backwards_over = 0
        """Backwards that have ended, by an exception or not."""
        self.on_device = False
        """A module is trained on a GPU."""
        self.has_new_loader = False
        """The newest batch is the first of all of its loader, and no training forward has come since."""
        self.look_soon: Callable[[], None] = lambda: None
        """Requests more than a note of the next training forward."""
        self.step_ring: Optional[Ring] = None
        self._faults = 0
        self.adopted: Callable[[int], None] = lambda thread: None
        """Called with another thread that is measured from now on."""

    @property
    def call_ring(self) -> Optional[Ring]:
        """The ring of explicit collectives."""
        return self.course.call_ring

    def start(self) -> None:
        """Measure from now on what the current thread of this process, a rank, does."""
        self.thread = threading.get_ident()
        self.open_rings()

    def open_rings(self) -> None:
        """Make the files of this process; without them nothing is measured."""
        if self.step_ring is None:
            directory, journal = self.journal.run_directory, self.journal
            try:
                self.step_ring = Ring(f"{directory}/{layout.steps_name(journal.pid)}", layout.STEPS)
                self.course.call_ring = Ring(f"{directory}/{layout.calls_name(journal.pid)}", layout.CALLS)
            except OSError as error:
                self.thread = _NO_THREAD
                journal.event("probe_fault", where="ring", text=repr(error), harms=["step_tracks", "call_tracks"])

    def is_training_thread(self) -> bool:
        """Return whether the calling thread is the one that is measured."""
        return self.thread == threading.get_ident()

    def adopts(self) -> bool:
        """Measure the calling thread from now on, where it is the first to train; return whether that is so."""
        if self.thread == _NO_THREAD or self.steps.current or self.journal.forwards:
            return False
        self.thread = threading.get_ident()
        self.adopted(self.thread)
        return True

    def meets_loader(self) -> None:
        """Note that a batch is the first of all of its loader."""
        self.has_new_loader = True
        self.look_soon()

    def stop(self) -> None:
        """Measure nothing any more."""
        self.thread = _NO_THREAD

    def fault(self, where: str, error: Exception, harms: tuple[str, ...]) -> None:
        """Note that a part of the probe has failed, and which streams lack something; switch off after some faults."""
        self._faults += 1
        self.journal.event("probe_fault", where=where, text=repr(error), harms=list(harms))
        if self._faults >= MOST_FAULTS:
            self.thread = _NO_THREAD

    def finish(self) -> None:
        """End the last step."""
        with self.moments.lock:
            self.moments.take_in()
            self.steps.finish()

    def become_forked_child(self) -> None:
        """Measure nothing in a child that a rank forked."""
        self.thread = _NO_THREAD
        self.moments.become_forked_child()
        for ring in (self.step_ring, self.call_ring):
            if ring is not None:
                ring.close()
        self.step_ring = self.course.call_ring = self.course.open_call = None

    def _put_step(self, row: tuple[int, ...]) -> None:
        if self.step_ring is not None:
            self.step_ring.put(row)


def rows_of(batch: Any) -> int:
    """Return the samples of a batch: the length of the first tensor in it; 0 when there is none at hand."""
    for _ in range(4):
        shape = getattr(batch, "shape", None)
        if shape is not None:
            return int(shape[0]) if len(shape) else 1
        if isinstance(batch, (list, tuple)) and batch:
            batch = batch[0]
        elif hasattr(batch, "values") and len(batch):
            batch = next(iter(batch.values()))
        else:
            return 0
    return 0
