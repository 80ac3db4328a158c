"""How much memory the parameters of an optimizer, their gradients and its own state take, reported once."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ReferenceType, ref

from ..journal import Journal

MEASURED_AT_STEP = 3
"""By then every parameter that will get a state has one."""
MOST_OPTIMIZERS = 64


class OptimizerSizes:
    """The steps of optimizers until they are measured; after that a step costs one look into a dictionary."""

    def __init__(
        self, journal: Journal, torch: Any, at_step: int = MEASURED_AT_STEP, *, any_device: bool = False
    ) -> None:
        """Measure what is on a GPU or, where the CPU stands in for one (``any_device``), everything."""
        self._journal = journal
        self._torch = torch
        self._at_step = at_step
        self._any_device = any_device
        self._steps: dict[int, int] = {}
        self.measured: set[int] = set()
        """Identities of optimizers that are measured."""
        self._counted: dict[int, ReferenceType[Any]] = {}
        """Parameters that were counted, by identity: an optimizer inside another one steers some of the same."""

    def stepped(self, optimizer: Any) -> None:
        """Count a step of an optimizer, and measure it at the step that is due."""
        made = self._steps.get(id(optimizer), 0) + 1
        if made > self._at_step or len(self._steps) >= MOST_OPTIMIZERS:
            return
        self._steps[id(optimizer)] = made
        if made == self._at_step:
            self.measured.add(id(optimizer))
            self._measure(optimizer)

    def _measure(self, optimizer: Any) -> None:
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"] if self._is_new(parameter)
        ]
        held = (value for state in optimizer.state.values() for value in _values(state))
        self._journal.event(
            "optimizer_size",
            type=type(optimizer).__name__,
            parameter_bytes=self._bytes(parameters),
            gradient_bytes=self._bytes(parameter.grad for parameter in parameters),
            state_bytes=self._bytes(held),
            shares_state=_shares_state(optimizer),
            device_memory_bytes=self._device_memory(parameters),
        )

    def _is_new(self, parameter: Any) -> bool:
        known = self._counted.get(id(parameter))
        if known is not None and known() is parameter:
            return False
        self._counted[id(parameter)] = ref(parameter)
        return True

    def _bytes(self, values: Iterable[Any]) -> int:
        return sum(
            value.numel() * value.element_size()
            for value in values
            if isinstance(value, self._torch.Tensor) and (self._any_device or value.is_cuda)
        )

    def _device_memory(self, parameters: Iterable[Any]) -> int:
        """Return the memory of the GPU that holds the parameters; 0 where none does."""
        device = next((parameter.device for parameter in parameters if parameter.is_cuda), None)
        return 0 if device is None else int(self._torch.cuda.get_device_properties(device).total_memory)


def _values(state: Any) -> Iterator[Any]:
    yield from state.values() if isinstance(state, dict) else ()


def _shares_state(optimizer: Any) -> bool:
    """Return whether each rank's optimizer holds a share of the state, and an inner one does the work."""
    sharding = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    return sharding is not None and isinstance(optimizer, sharding)
