"""The course of the training thread, from moments in their order: phases, steps and explicit collectives."""

from __future__ import annotations

from typing import Optional

from ....record.clock import offset_ns
from ....record.ring_writer import Ring
from ...journal import Journal
from .steps import ACTIVE, CANDIDATE, Source, Steps
from .stopwatch import (
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
