"""The state that the hooks of a live run share, and the way they are kept from doing harm."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Callable, Optional

from ...record import layout
from ...record.writer import Ring, offset_ns
from ..journal import Journal
from .clocks import (
    BACKWARD,
    BUCKETS,
    DATA_WAIT,
    EVALUATION,
    EXPLICIT,
    EXPLICIT_BYTES,
    EXPLICIT_CALLS,
    FORWARD,
    REDUCED_BYTES,
    SYNCHRONISED,
    Stopwatch,
)
from .steps import ACTIVE, CANDIDATE, Source, Steps

# The course of the training thread, from moments in their order: phases, steps and explicit collectives.


class Course:
    """The stopwatch, the steps and the counters; times are those of the monotonic clock at the moment itself."""

    def __init__(self, watch: Stopwatch, steps: Steps, journal: Journal) -> None:
        self._journal = journal
        self._watch = watch
        self._steps = steps
        self.call_ring: Optional[Ring] = None
        self.open_call: Optional[tuple[int, tuple[int, ...]]] = None
        """The explicit collective that the training thread is in: number and fields of its row."""

    def fetch_began(self, source: Source, recording: bool, now_ns: int) -> None:
        """Begin a fetch; ``recording`` is whether gradients are on."""
        self._steps.fetch_begins(source, recording, now_ns)
        self._watch.enter(EVALUATION if self._steps.evaluating else DATA_WAIT, now_ns)

    def fetch_ended(self, samples: int, started_workers: bool, now_ns: int) -> None:
        """End a fetch with a batch."""
        self._watch.leave(now_ns)
        self._steps.fetch_ended(samples, started_workers, now_ns)

    def fetch_failed(self, exhausted: Optional[Source], now_ns: int) -> None:
        """End a fetch without a batch; ``exhausted`` is the loader that has come to its end."""
        self._watch.leave(now_ns)
        if exhausted is not None:
            self._steps.pass_ended(exhausted)

    def forward_began(self, recording: bool, training: bool, now_ns: int) -> None:
        """Begin a forward through a DDP module; ``training`` is the module's flag."""
        steps, phase = self._steps, FORWARD
        if recording:
            steps.trains(now_ns)
            self._journal.forwards += training
        else:
            if steps.state == CANDIDATE and not training:
                steps.evaluating = True
            if steps.state != ACTIVE and (steps.state != CANDIDATE or steps.evaluating):
                phase = EVALUATION
                steps.pause(now_ns)
        self._watch.enter(phase, now_ns)

    def backward_began(self, now_ns: int) -> None:
        """Begin a backward."""
        self._steps.trains(now_ns)
        self._watch.enter(BACKWARD, now_ns)

    def backward_ended(self, modules: int, size_bytes: int, buckets: int, now_ns: int) -> None:
        """End a backward in which so many modules have reduced so many bytes in so many buckets."""
        self._watch.leave(now_ns)
        tally = self._watch.tally
        tally[SYNCHRONISED] += modules
        tally[REDUCED_BYTES] += size_bytes
        tally[BUCKETS] += buckets
        self._journal.backwards += 1
        self._steps.backward_ended(now_ns)

    def optimizer_stepped(self, optimizer: int, now_ns: int) -> None:
        """End a step of the optimizer with the identity ``optimizer``."""
        self._journal.optimizer_steps += 1
        self._watch.leave(now_ns)
        self._steps.optimizer_stepped(optimizer, now_ns)

    def pause_began(self, phase: int, now_ns: int) -> None:
        """Begin something that belongs to no step, once the optimizer has stepped."""
        self._steps.pause(now_ns)
        self._watch.enter(phase, now_ns)

    def call_began(self, kind: int, group: int, sequence: int, size_bytes: int, site: int, now_ns: int) -> None:
        """Begin an explicit collective, or the wait for one."""
        self._watch.enter(EXPLICIT, now_ns)
        if self.call_ring is not None:
            row = (kind, group, sequence, self._steps.current, now_ns + offset_ns(), 0, size_bytes, site)
            self.open_call = self.call_ring.next, row

    def call_started(self, now_ns: int) -> None:
        """Leave an asynchronous collective that is under way; it will have its row when it has been waited for."""
        self._watch.leave(now_ns)
        self._steps.called(now_ns)
        self.open_call = None

    def call_ended(self, now_ns: int) -> None:
        """End an explicit collective, and write its row."""
        call, ring, watch = self.open_call, self.call_ring, self._watch
        watch.leave(now_ns)
        self._steps.called(now_ns)
        self.open_call = None
        if call is not None and ring is not None:
            kind, group, sequence, step, entered_at_ns, _, size_bytes, site = call[1]
            watch.tally[EXPLICIT_CALLS] += 1
            watch.tally[EXPLICIT_BYTES] += size_bytes
            ring.put((kind, group, sequence, step, entered_at_ns, now_ns + offset_ns(), size_bytes, site))


# The moments that hooks note of the training thread, kept in order until a thread has the time to process them.

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


_NO_THREAD = -1
MOST_FAULTS = 3


class Observer:
    """What one rank holds of its own training."""

    __slots__ = (
        "_faults", "adopted", "backwards", "backwards_over", "course", "has_new_loader", "journal", "look_soon",
        "moments", "on_device", "shards", "step_ring", "steps", "thread", "watch",
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
        self.shards = False
        """A sharded module trains here: what it calls in backward is a collective like others, and no part of DDP's."""
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

    @property
    def is_off(self) -> bool:
        """The probe has switched itself off, after some faults."""
        return self._faults >= MOST_FAULTS

    def current_step(self) -> int:
        """Return the number of the step that the training thread is in."""
        self.moments.take_in()
        return self.steps.current

    def start(self) -> None:
        """Measure from now on what the current thread of this process, a rank, does."""
        self.thread = threading.get_ident()
        self.open_rings()

    def open_rings(self) -> None:
        """Make the files of this process; without them nothing is measured."""
        if self.step_ring is None:
            directory, journal = self.journal.run_directory, self.journal
            try:
                self.step_ring = Ring(f"{directory}/{layout.STEPS_FILE.format(journal.pid)}", layout.STEPS)
                self.course.call_ring = Ring(f"{directory}/{layout.CALLS_FILE.format(journal.pid)}", layout.CALLS)
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
        if self.is_off:
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
