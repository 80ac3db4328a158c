"""Times of the phases by CUDA events: read when the device has passed them, never waited for.

While a graph of CUDA is captured none is made or read: a capture in its usual mode fails when any thread of the process
asks for an event, and an event that is part of a graph cannot be read. torch's own watchdog of NCCL changes the mode of
its thread for that (CUDAStreamCaptureModeGuard); Python cannot.
"""

from __future__ import annotations

import threading
from typing import Any, Callable

from ...call_listeners import on_call
from ...journal import Journal
from .stopwatch import BACKWARD, FORWARD, OPTIMIZER

MEASURED_EVERY = 20
"""One step of so many is measured; an event costs some microseconds."""
_PHASES = (FORWARD, BACKWARD, OPTIMIZER)


class GraphCaptures:
    """Whether a graph is captured now; after a capture that has failed that is not known, and nothing is measured."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Whoever reads events holds it, so that no capture begins meanwhile."""
        self.open = False

    def listen(self, journal: Journal, graph_class: Any) -> None:
        """Listen to the captures of ``torch.cuda.CUDAGraph``, which makes those of ``torch.compile``, too."""
        for name, is_open in (("capture_begin", True), ("capture_end", False)):
            if hasattr(graph_class, name):
                # Before a capture begins, and after it has ended.
                moment = "before" if is_open else "after"
                on_call(journal, graph_class, name, **{moment: self._becoming(is_open)}, harms=())

    def _becoming(self, is_open: bool) -> Callable[..., None]:
        def become(*call: Any) -> None:
            with self.lock:
                self.open = is_open

        return become


class DeviceTimes:
    """The events of one step. ``make_event`` gives an event that keeps its time."""

    def __init__(self, make_event: Callable[[], Any], captures: GraphCaptures) -> None:
        self._make_event = make_event
        self._captures = captures
        self._in_a_graph = False
        self._spans: dict[int, list[list[Any]]] = {phase: [] for phase in _PHASES}

    def begins(self, phase: int) -> None:
        """Begin a phase on the host."""
        if self._may_be_measured():
            self._spans[phase].append([self._recorded()])

    def ends(self, phase: int) -> None:
        """End it on the host."""
        spans = self._spans[phase]
        if self._may_be_measured() and spans and len(spans[-1]) == 1:
            spans[-1].append(self._recorded())

    def durations_ns(self) -> list[int]:
        """Return forward, backward and optimizer in the order of the stream; -1 for what the device has not passed."""
        with self._captures.lock:
            if self._in_a_graph or self._captures.open:
                return [-1] * len(_PHASES)
            return [self._duration_ns(self._spans[phase]) for phase in _PHASES]

    def _may_be_measured(self) -> bool:
        self._in_a_graph = self._in_a_graph or self._captures.open
        return not self._in_a_graph

    def _recorded(self) -> Any:
        event = self._make_event()
        event.record()
        return event

    def _duration_ns(self, spans: list[list[Any]]) -> int:
        whole = [span for span in spans if len(span) == 2]
        if not whole or not all(span[1].query() for span in whole):
            return -1
        return round(sum(float(span[0].elapsed_time(span[1])) for span in whole) * 1e6)
