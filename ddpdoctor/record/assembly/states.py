"""Puts together what the ranks' optimizers, schedulers and scalers held at the first step with what was loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ddpdoctor.record.streams.training import TrainingState


class StateRows:
    """Takes in the events; a load that comes after the state was taken down is a late one."""

    def __init__(
        self, converted: Callable[[int, dict[str, Any], type[Any]], Any], site_of: Callable[[int, object], int]
    ) -> None:
        self._converted = converted
        self._site_of = site_of
        self._states: dict[tuple[int, str, int], TrainingState] = {}
        self._early: dict[tuple[int, str, int], list[int]] = {}
        self._late: dict[tuple[int, str, int], list[int]] = {}
        self.handlers: Mapping[str, Callable[[int, dict[str, Any]], None]] = {
            "training_state": self._on_state,
            "state_loaded": self._on_loaded,
        }

    def rows(self) -> tuple[TrainingState, ...]:
        """What was held at the first step, with the loads that came before and after it."""
        return tuple(
            msgspec.structs.replace(
                state, loads=tuple(self._early.get(key, ())), late_loads=tuple(self._late.get(key, ()))
            )
            for key, state in self._states.items()
        )

    def _on_state(self, pid: int, event: dict[str, Any]) -> None:
        self._states[pid, event["kind"], event["number"]] = self._converted(pid, event, TrainingState)

    def _on_loaded(self, pid: int, event: dict[str, Any]) -> None:
        key = (pid, event["kind"], event["number"])
        loads = self._late if key in self._states else self._early
        loads.setdefault(key, []).append(self._site_of(pid, event["site"]))
