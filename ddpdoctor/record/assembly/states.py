"""Puts together what the ranks' optimizers, schedulers and scalers held at the first step with what was loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ddpdoctor.record import events
from ddpdoctor.record.events import Row
from ddpdoctor.record.streams.training import TrainingState


class StateRows:
    """Takes in the events; a load that comes after the state was taken down is a late one."""

    def __init__(self, converted: Callable[[int, Row, type[Any]], Any], site_of: Callable[[int, object], int]) -> None:
        self._converted = converted
        self._site_of = site_of
        self._states: dict[tuple[int, str, int], TrainingState] = {}
        self._early: dict[tuple[int, str, int], list[int]] = {}
        self._late: dict[tuple[int, str, int], list[int]] = {}

    def rows(self) -> tuple[TrainingState, ...]:
        """Return what was held at the first step, with the loads that came before and after it."""
        return tuple(
            msgspec.structs.replace(
                state, loads=tuple(self._early.get(key, ())), late_loads=tuple(self._late.get(key, ()))
            )
            for key, state in self._states.items()
        )

    def on_state(self, pid: int, event: Row) -> None:
        """Take in what something held at the first step."""
        state = self._converted(pid, event, TrainingState)
        self._states[pid, state.kind, state.number] = state

    def on_loaded(self, pid: int, event: events.StateLoaded) -> None:
        """Take in that something was loaded."""
        key = (pid, event.kind, event.number)
        loads = self._late if key in self._states else self._early
        loads.setdefault(key, []).append(self._site_of(pid, event.site))
