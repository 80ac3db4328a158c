"""A thread that says, five times a second, that this rank lives and what its training thread does."""

from __future__ import annotations

import json
import sys
import threading
import time
from types import FrameType
from typing import Any, Optional

from ...record import layout
from ..heartbeat import register_for_stacks, thread_clock, write_stacks
from .observer import Observer
from .stopwatch import BACKWARD, EPOCH_NS, EVALUATION, FINISHED, OTHER, STARTING

BEAT_S = 0.2
SITE_AFTER_MS = 500
"""The user's line is told once the stack of the training thread has stood for so long."""
_REDUCTION = layout.CALL_KINDS.index("reduction")


class PulseThread:
    """Watches the training thread of its own process, and takes its rows to their files."""

    def __init__(self, observer: Observer, torch: Any) -> None:
        self._observer = observer
        self._status = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
        self._clock: Optional[int] = None
        self._watched = 0
        self._stack: tuple[int, ...] = ()
        self._stack_since_ns = 0
        self._answered = 0
        self._site = -1
        self._beating = threading.Lock()

    def start(self) -> None:
        """Start the thread; it dies with the process."""
        self._watched = self._observer.thread
        self._clock = thread_clock(self._watched)
        register_for_stacks(self._observer.journal.run_directory)
        threading.Thread(target=self._run, name="ddpdoctor-pulse", daemon=True).start()

    def last_beat(self) -> None:
        """Write everything: the process is about to end."""
        with self._beating:
            self._beat(finished=True)
            self._observer.step_ring = self._observer.call_ring = None

    def _run(self) -> None:
        while True:
            time.sleep(BEAT_S)
            with self._beating:
                if self._observer.step_ring is None:
                    return
                try:
                    self._beat(finished=False)
                except Exception as error:
                    self._observer.fault("pulse", error)
                    return

    def _beat(self, *, finished: bool) -> None:
        observer = self._observer
        steps_ring, calls_ring, journal = observer.step_ring, observer.call_ring, observer.journal
        if steps_ring is None or calls_ring is None:
            return
        requested = steps_ring.requested()
        if requested != self._answered:
            write_stacks(journal, self._watched)
            self._answered = requested
        phase, since_ns, call = observer.watch.phase, observer.watch.since_ns, observer.open_call
        now_ns = time.monotonic_ns()
        observer.steps.flush_old(now_ns)
        observer.flush()
        frame = sys._current_frames().get(self._watched)
        stack = _places(frame)
        if stack != self._stack:
            self._stack, self._stack_since_ns, self._site = stack, now_ns, -1
        unchanged_ms = (now_ns - self._stack_since_ns) // 1_000_000
        if unchanged_ms >= SITE_AFTER_MS and self._site < 0:
            self._site = journal.site(frame)
        enqueued, completed = self._counts()
        kind, sequence = (call[1][0], call[1][2]) if call is not None else (-1, -1)
        if call is None and phase == BACKWARD and enqueued > completed:
            kind = _REDUCTION
        if finished:
            phase = FINISHED
        elif phase == OTHER and not observer.steps.current:
            phase = STARTING
        elif phase == OTHER and observer.steps.evaluating:
            phase = EVALUATION
        pulse = (
            now_ns + EPOCH_NS,
            phase,
            since_ns + EPOCH_NS,
            observer.steps.current,
            kind,
            sequence,
            enqueued,
            completed,
            self._site,
            time.clock_gettime_ns(self._clock) if self._clock is not None else time.process_time_ns(),
            unchanged_ms,
            hash(stack),
            journal.forwards,
            journal.backwards,
            journal.optimizer_steps,
            self._answered,
            journal.sleeps_until_ns,
            journal.writer.lost,
            steps_ring.lost + calls_ring.lost,
        )
        steps_ring.write_head(pulse)
        calls_ring.write_head()

    def _counts(self) -> tuple[int, int]:
        """Collectives of the default group that were enqueued and completed; -1 where torch does not tell."""
        if self._status is None:
            return -1, -1
        groups = json.loads(self._status(includeCollectives=False)).get("pg_status", {})
        world = groups.get("0", {})
        return int(world.get("last_enqueued_collective", -1)), int(world.get("last_completed_collective", -1))


def _places(frame: Optional[FrameType]) -> tuple[int, ...]:
    places = []
    while frame is not None:
        places.append(id(frame.f_code))
        places.append(frame.f_lasti)
        frame = frame.f_back
    return tuple(places)
