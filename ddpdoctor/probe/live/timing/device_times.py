"""Times of the phases by CUDA events: read when the device has passed them, never waited for."""

from __future__ import annotations

from typing import Any, Callable

from .stopwatch import BACKWARD, FORWARD, OPTIMIZER

MEASURED_EVERY = 20
"""One step of so many is measured; an event costs some microseconds."""
_PHASES = (FORWARD, BACKWARD, OPTIMIZER)


class DeviceTimes:
    """The events of one step. ``make_event`` gives an event that keeps its time."""

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._make_event = make_event
        self._spans: dict[int, list[list[Any]]] = {phase: [] for phase in _PHASES}

    def begins(self, phase: int) -> None:
        """Begin a phase on the host."""
        self._spans[phase].append([self._recorded()])

    def ends(self, phase: int) -> None:
        """End it on the host."""
        spans = self._spans[phase]
        if spans and len(spans[-1]) == 1:
            spans[-1].append(self._recorded())

    def durations_ns(self) -> list[int]:
        """Return forward, backward and optimizer in the order of the stream; -1 for what the device has not passed."""
        return [self._duration_ns(self._spans[phase]) for phase in _PHASES]

    def _recorded(self) -> Any:
        event = self._make_event()
        event.record()
        return event

    def _duration_ns(self, spans: list[list[Any]]) -> int:
        whole = [span for span in spans if len(span) == 2]
        if not whole or not all(span[1].query() for span in whole):
            return -1
        return round(sum(float(span[0].elapsed_time(span[1])) for span in whole) * 1e6)
