"""Where a training step begins and ends, and the row of each.

A step begins with the fetch of its first batch (or, where no loader is drawn from, with its first training forward)
and ends where the next one begins, or with the evaluation, the checkpoint or the end of the pass that comes before it.

* **Accumulation**: fetches before an optimizer has stepped are micro-batches of the same step.
* **Several optimizers** that step in one iteration make one step, with one fetch or several between them only if the
  same batch serves them; without a loader a step is over when an optimizer steps for the second time, and it ended at
  the training forward after the optimizer before.
* **Evaluation**: a fetch is taken for a step's only once a training forward or a backward has followed it. A batch that
  is fetched where gradients are off, or from a loader that has never trained while another one has, is evaluation until
  a backward proves otherwise.
* **Several loaders** (``zip``): the step begins with the first of the fetches that directly precede its forward.
* **Workers**: the first fetch of a pass whose workers have only just been started belongs to the pause before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Optional

from ...record import layout
from ...record.writer import offset_ns
from .clocks import (
    BACKWARD,
    BATCHES,
    BUCKETS,
    DATA_WAIT,
    EVALUATION,
    EXPLICIT,
    EXPLICIT_BYTES,
    EXPLICIT_CALLS,
    FORWARD,
    MEASURED_EVERY,
    MICRO_BATCHES,
    OPTIMIZER,
    REDUCED_BYTES,
    SAMPLES,
    SYNCHRONISED,
    DeviceTimes,
    Stopwatch,
)

IDLE, CANDIDATE, ACTIVE, STEPPED = range(4)
"""No step is open; a batch was fetched; it was trained on; an optimizer has stepped."""
MOST_HELD_NS = 1_000_000_000
MOST_HELD = layout.LIVE_ROWS
_NO_DEVICE = (-1, -1, -1)


class Source:
    """A loader, as far as it matters to steps."""

    __slots__ = ("trained",)

    def __init__(self) -> None:
        self.trained = False
        """A backward has followed a fetch from it."""


class ReductionSample:
    """What DDP's logger measured of synchronised backwards of one step."""

    __slots__ = ("exposed_ns", "moments", "window_ns")

    def __init__(self) -> None:
        self.exposed_ns = self.window_ns = 0
        self.moments: list[tuple[int, int]] = []
        """Of each backward, when its last gradient was ready and when all were reduced."""

    def add(self, exposed_ns: int, window_ns: int, ready_at_ns: int, reduced_at_ns: int) -> None:
        """Add one backward."""
        self.exposed_ns += exposed_ns
        self.window_ns += window_ns
        self.moments.append((ready_at_ns, reduced_at_ns))


class Pending:
    """A step that is over, while DDP's logger may yet add to it."""

    __slots__ = ("_began_ns", "_device_times", "_step", "_tally", "ended_ns", "sample")

    def __init__(
        self,
        step: int,
        began_ns: int,
        ended_ns: int,
        tally: list[int],
        sample: Optional[ReductionSample],
        device_times: Optional[DeviceTimes],
    ) -> None:
        self._step = step
        self._began_ns = began_ns
        self.ended_ns = ended_ns
        self._tally = tally
        self.sample = sample
        self._device_times = device_times

    def row(self) -> tuple[int, ...]:
        """Return the row of the step, in the order of ``layout.STEP_FIELDS``."""
        tally, sample = self._tally, self.sample
        exposed_ns, window_ns, ready_at_ns, reduced_at_ns = -1, -1, 0, 0
        if sample is not None:
            # Backwards that were not sampled are taken to be as those that were.
            moments = sorted(sample.moments)
            share = max(tally[SYNCHRONISED], len(moments)) / len(moments)
            exposed_ns, window_ns = round(sample.exposed_ns * share), round(sample.window_ns * share)
            # Of several backwards, as of two models, a row has room for one: another in each step, alike on all ranks.
            ready_at_ns, reduced_at_ns = moments[self._step % len(moments)]
        device_ns = self._device_times.durations_ns() if self._device_times is not None else _NO_DEVICE
        return (
            self._step,
            self._began_ns + offset_ns(),
            self.ended_ns + offset_ns(),
            tally[DATA_WAIT],
            tally[FORWARD],
            tally[BACKWARD],
            tally[EXPLICIT],
            tally[OPTIMIZER],
            exposed_ns,
            window_ns,
            ready_at_ns,
            reduced_at_ns,
            tally[REDUCED_BYTES],
            tally[BUCKETS],
            tally[EXPLICIT_CALLS],
            tally[EXPLICIT_BYTES],
            tally[SAMPLES],
            tally[BATCHES],
            tally[MICRO_BATCHES],
            tally[SYNCHRONISED],
            *device_ns,
        )


class Steps:
    """The steps of one rank; one thread at a time may call it."""

    def __init__(self, watch: Stopwatch, put: Callable[[tuple[int, ...]], None]) -> None:
        self._watch = watch
        self._put = put
        self.state = IDLE
        self.completed = 0
        """Steps that are over."""
        self._began_ns = 0
        self._fetched: list[Source] = []
        """Sources of the fetches of the open step that came before its first forward."""
        self._any_trained = False
        self._optimizers: set[int] = set()
        self._split: Optional[tuple[int, list[int]]] = None
        """When the first training forward after an optimizer step began, and the tally by then."""
        self._end: Optional[tuple[int, list[int]]] = None
        """When a pause began after the optimizer step, and the tally by then."""
        self._last_ns = 0
        """End of the newest phase that belongs to the open step."""
        self.evaluating = False
        """The newest fetch is taken for one of an evaluation."""
        self._sample: Optional[ReductionSample] = None
        self.make_device_times: Optional[Callable[[], DeviceTimes]] = None
        """Known once a module is trained on a GPU."""
        self.device_times: Optional[DeviceTimes] = None
        """Those of the open step, if it is one that is measured."""
        self._held: deque[Pending] = deque(maxlen=MOST_HELD)
        """Steps with rows that have not been handed out: DDP's logger may yet be read about the newest one, in the
        forward after, and rows are made where the training does not wait for it."""

    @property
    def current(self) -> int:
        """Ordinal of the open step, or of the newest one; 0 before the first."""
        return self.completed + (self.state >= ACTIVE)

    @property
    def of_newest_forward(self) -> int:
        """Ordinal of the step that the newest training forward belongs to, if a backward follows it."""
        return self.current + (self.state == STEPPED and self._split is not None)

    def fetch_begins(self, source: Source, recording: bool, now_ns: int) -> None:
        """Begin a fetch; ``recording`` is whether gradients are on."""
        if self.state == ACTIVE:
            return
        was_evaluating = self.evaluating
        self.evaluating = not recording or (self._any_trained and not source.trained)
        if self.state == STEPPED and self._awaits_backward():
            # A batch is fetched ahead, between a forward and its backward.
            self._begin_at_split(now_ns)
            return
        if self.state == STEPPED:
            self._close(now_ns)
        elif self.state == CANDIDATE and not (was_evaluating or self.evaluating or self._is_repeated(source)):
            self._fetched.append(source)
            return
        self._watch.reset()
        self._begin(now_ns)
        self.state = CANDIDATE
        self._fetched = [source]

    def fetch_ended(self, samples: int, started_workers: bool, now_ns: int) -> None:
        """End a fetch with a batch."""
        if started_workers and self.state == CANDIDATE and len(self._fetched) == 1:
            self._begin(now_ns)
        self._watch.tally[SAMPLES] += samples
        self._watch.tally[BATCHES] += 1
        self._last_ns = now_ns

    def pass_ended(self, source: Source) -> None:
        """End a pass: there was no batch left."""
        if self.state == CANDIDATE and self._fetched == [source]:
            self.state = IDLE

    def pause(self, now_ns: int) -> None:
        """Begin an evaluation, saving or a pass: if the step has been made it is over."""
        if self.state == STEPPED and self._end is None:
            self._end = now_ns, self._watch.settled(now_ns)

    def trains(self, now_ns: int) -> None:
        """Begin a training forward or a backward."""
        if self.state == STEPPED:
            if self._split is None:
                self._split = now_ns, self._watch.settled(now_ns)
            return
        if self.state == ACTIVE:
            return
        if self.state == IDLE:
            self._begin(now_ns)
            self._fetched = []
        tally = self._watch.tally
        tally[DATA_WAIT] += tally[EVALUATION]
        self.state = ACTIVE
        self.evaluating = False

    def backward_ended(self, now_ns: int) -> None:
        """End a backward: the loaders that fed it are training loaders."""
        self._watch.tally[MICRO_BATCHES] += 1
        self._last_ns = now_ns
        if self._fetched:
            for source in self._fetched:
                source.trained = True
            self._any_trained = True

    def optimizer_stepped(self, optimizer: int, now_ns: int) -> None:
        """End a step of an optimizer."""
        if self.state == IDLE:
            return
        if self._split is not None and optimizer in self._optimizers:
            self._begin_at_split(now_ns)
        self.state = STEPPED
        self._split = self._end = None
        self._optimizers.add(optimizer)
        self._last_ns = now_ns

    def called(self, now_ns: int) -> None:
        """End an explicit collective."""
        self._last_ns = now_ns

    def sampled(self, exposed_ns: int, window_ns: int, ready_at_ns: int, reduced_at_ns: int) -> None:
        """Add what DDP's logger measured of a backward, of the open step or of the newest row."""
        pending = self._held[-1] if self._held else None
        if pending is not None and ready_at_ns < pending.ended_ns + offset_ns():
            sample = pending.sample = pending.sample or ReductionSample()
        else:
            sample = self._sample = self._sample or ReductionSample()
        sample.add(exposed_ns, window_ns, ready_at_ns, reduced_at_ns)

    def hand_out(self, now_ns: int) -> None:
        """Hand out the rows, without the newest unless that was held for long: no forward has come since."""
        held = self._held
        while len(held) > 1 or (held and now_ns - held[0].ended_ns > MOST_HELD_NS):
            self._put(held.popleft().row())

    def finish(self) -> None:
        """End the last step with the last thing that belongs to it, as the process ends."""
        if self.state == STEPPED:
            now_ns = max(self._last_ns, self._began_ns)
            self._write(*(self._end or (now_ns, self._watch.tally)))
            self.state = IDLE
        while self._held:
            self._put(self._held.popleft().row())

    def _awaits_backward(self) -> bool:
        """Return whether a training forward after the optimizer's step has had no backward yet."""
        return self._split is not None and self._watch.tally[MICRO_BATCHES] == self._split[1][MICRO_BATCHES]

    def _is_repeated(self, source: Source) -> bool:
        """Return whether a loader that never trained is drawn from again although its batch was not trained on."""
        return not source.trained and source in self._fetched

    def _begin(self, now_ns: int) -> None:
        self._watch.restart(now_ns)
        self._began_ns = now_ns
        self._optimizers.clear()
        self._split = self._end = None

    def _begin_at_split(self, now_ns: int) -> None:
        """Begin a step of its own with the forward after an optimizer's step."""
        if self._split is None:
            return
        began_ns, tally = self._split
        self._watch.settled(now_ns)
        self._write(*(self._end or self._split))
        self._watch.give_back(tally)
        self._began_ns = began_ns
        self._optimizers.clear()
        self._split = self._end = None
        self._fetched = []
        self.state = ACTIVE

    def _close(self, now_ns: int) -> None:
        self._write(*(self._end or (now_ns, self._watch.settled(now_ns))))
        self.state = IDLE

    def _write(self, ended_ns: int, tally: list[int]) -> None:
        self.completed += 1
        began_ns, sample, device_times = self._began_ns, self._sample, self.device_times
        self._held.append(Pending(self.completed, began_ns, ended_ns, tally, sample, device_times))
        self._sample = None
        measures = self.make_device_times is not None and self.completed % MEASURED_EVERY == 0
        self.device_times = self.make_device_times() if measures and self.make_device_times is not None else None
