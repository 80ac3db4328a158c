"""Tells once of each optimizer how much memory its parameters, their gradients and its own state take on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..journal import Journal

MEASURED_AT_STEP = 3
"""By then every parameter that will get a state has one."""
MOST_OPTIMIZERS = 64


class OptimizerSizes:
    """Counts the steps of optimizers until they are measured; after that a step costs one look into a dictionary."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        self._journal = journal
        self._torch = torch
        self._steps: dict[int, int] = {}

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        made = self._steps.get(id(optimizer), 0) + 1
        if made > MEASURED_AT_STEP or len(self._steps) >= MOST_OPTIMIZERS:
            return
        self._steps[id(optimizer)] = made
        if made == MEASURED_AT_STEP:
            self._measure(optimizer)

    def _measure(self, optimizer: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        held = (value for state in optimizer.state.values() for value in _values(state))
        self._journal.event(
            "optimizer_size",
            type=type(optimizer).__name__,
            parameter_bytes=self._on_gpu(parameters),
            gradient_bytes=self._on_gpu(parameter.grad for parameter in parameters),
            state_bytes=self._on_gpu(held),
        )

    def _on_gpu(self, values: Iterable[Any]) -> int:
        return sum(
            value.numel() * value.element_size()
            for value in values
            if isinstance(value, self._torch.Tensor) and value.is_cuda
        )


def _values(state: Any) -> Iterator[Any]:
    yield from state.values() if isinstance(state, dict) else ()
