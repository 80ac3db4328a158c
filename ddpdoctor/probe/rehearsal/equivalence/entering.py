"""What enters a loss beside parameters, and is neither made by code alone nor given to this process: data of its own.

A process that stands for a rank is given the batches of its loaders and the numbers that torch draws. Targets that
NumPy draws, or rows of a file at places of the rank's own, are not; their digests show whether it used the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from ...journal import Journal
from ...observed import tensor_digest

MOST_NOTED = 256
"""Of a step; what comes after them is not compared."""
_MOST_MARKS = 4096
"""Of which those whose memory is freed are then forgotten."""
_SHIFTS = ("aten::add", "aten::sub", "aten::rsub")
"""Operators by which a number of Python is a target: one that only scales is a matter of the loss itself."""
_FACTORS = ("aten::mul", "aten::div")

GIVEN, OWN, COMPUTED = range(3)
"""Made by code or given to this process; data of its own; computed from parameters, or with other ranks. What is
computed of several is the last of them."""


class Entering:
    """Digests of a process' own data at the operators where it meets what has a gradient."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._journal = journal
        self._torch = torch
        self._weakly = StorageWeakRef
        self._marks: dict[int, tuple[Any, int]] = {}
        """By storage, which is not freed in full, and its address not used again, while a weak reference is held."""
        self.noted: dict[str, tuple[str, int]] = {}
        """Since the last step, with file and line of the user's."""

    def mark(self, value: Any, kind: int) -> None:
        """Say what the tensors in a value are; what is known of their memory stays if it is more."""
        for tensor in self._tensors(value):
            self._set(tensor, max(kind, self._marked(tensor) or GIVEN))

    def see(self, name: str, arguments: Any, options: Any, result: Any) -> None:
        """Note what an operator of a forward pass is given."""
        if self._torch._C._current_graph_task_id() != -1:
            return
        tensors = list(self._tensors((arguments, options)))
        if name.startswith("c10d::"):
            together = "reduce" in name or "gather" in name
            self.mark([tensors, result], COMPUTED if together else OWN)
            return
        kinds = [self._kind(tensor) for tensor in tensors]
        for tensor in self._tensors(result):
            self._set(tensor, max(kinds, default=GIVEN))
        enabled = self._torch.is_grad_enabled()
        # The forward of a function with a backward of its own runs without gradients.
        if any(tensor.requires_grad and (enabled or not tensor.is_leaf) for tensor in tensors):
            for tensor, kind in zip(tensors, kinds):
                if kind == OWN and not (name in _FACTORS and tensor.numel() == 1):
                    self._note(tensor_digest(tensor))
            if name in _SHIFTS:
                for number in arguments:
                    if type(number) in (int, float):
                        self._note(repr(float(number)))

    def _note(self, digest: str) -> None:
        if digest and digest not in self.noted and len(self.noted) < MOST_NOTED:
            frames = self._journal.user_code.frames_here(sys._getframe(2))
            self.noted[digest] = (frames[0][0], frames[0][1]) if frames else ("", 0)

    def _kind(self, tensor: Any) -> int:
        marked = self._marked(tensor)
        if marked is not None:
            return marked
        is_parameter = isinstance(tensor, self._torch.nn.Parameter)
        return COMPUTED if is_parameter or (tensor.requires_grad and not tensor.is_leaf) else OWN

    def _marked(self, tensor: Any) -> int | None:
        try:
            found = self._marks.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # What is sparse has no storage.
            return None
        return None if found is None else found[1]

    def _set(self, tensor: Any, kind: int) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        held = self._marks.get(storage._cdata)
        self._marks[storage._cdata] = (held[0] if held else self._weakly(storage), kind)
        if len(self._marks) > _MOST_MARKS:
            self._marks = {at: one for at, one in self._marks.items() if not one[0].expired()}

    def _tensors(self, value: Any) -> Iterator[Any]:
        if isinstance(value, self._torch.Tensor):
            yield value
        elif isinstance(value, dict):
            for part in value.values():
                yield from self._tensors(part)
        elif isinstance(value, (list, tuple)):
            for part in value:
                yield from self._tensors(part)
