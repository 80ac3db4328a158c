"""The GPUs that the stand-in pretends: how many, which is current, and what a device that a user names becomes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Optional

CUDA = "cuda"
NO_SUCH_GPU = "invalid device ordinal"
"""CUDA's error for a GPU that the node lacks."""


class Devices:
    """The GPUs of one process, and the translation of devices to the CPU."""

    def __init__(self, torch: Any, count: int, note_use: Callable[[int, str], object], *, known: bool = True) -> None:
        """With ``known`` the layout gives the GPUs of a node; otherwise the node of the job may have more."""
        self._torch = torch
        self._present = count
        self._known = known
        self._note_use = note_use
        """Called with an index and how it was chosen (``explicit``, ``current``) at the first such use."""
        self._used: set[tuple[int, str]] = set()
        self._current = threading.local()
        self._visible: Optional[int] = None
        self._error: type = getattr(torch, "AcceleratorError", RuntimeError)
        self.cpu = torch.device("cpu")
        self.was_set = False
        """``set_device`` was called, or a device context entered."""
        self.used_by_parent = False
        """The process that forked this one had put something on a GPU, which no GPU context outlives."""
        os.register_at_fork(after_in_child=self._begin_as_child)

    def _begin_as_child(self) -> None:
        self.used_by_parent = bool(self._used) or self.used_by_parent
        self._used.clear()

    @property
    def in_use(self) -> bool:
        """A device was selected or used, before which a device mesh selects one by itself."""
        return self.was_set or bool(self._used)

    def count(self) -> int:
        """Return the GPUs that the process sees; ``CUDA_VISIBLE_DEVICES`` is read once, as CUDA does."""
        if self._visible is None:
            named = os.environ.get("CUDA_VISIBLE_DEVICES")
            self._visible = self._present if named is None else self._usable(named)
        return self._visible

    def _usable(self, named: str) -> int:
        """Return the entries up to the first without a GPU: a job's node may well have the GPUs 4 and 5."""
        usable = 0
        for entry in named.split(","):
            text = entry.strip()
            if self._known and text.isdigit() and int(text) >= self._present:
                break
            if not text or text == "-1":
                break
            usable += 1
        return min(usable, self._present)

    @property
    def current(self) -> int:
        """The current device of this thread; 0 in a new thread, as in CUDA."""
        return getattr(self._current, "index", 0)

    def select(self, device: Any) -> None:
        """Make a device the current one; a negative index changes nothing, as in torch."""
        index = self.index(device, optional=True)
        if index >= 0:
            self._current.index = self.checked(index)
            self.was_set = True

    def exchange(self, index: int) -> int:
        """Make a device the current one and return the former; -1 changes nothing."""
        former = self.current
        if index >= 0:
            self._current.index = self.checked(index)
            self.was_set = True
        return former

    def index(self, device: Any, optional: bool = False) -> int:
        """Return the index of a device, a string, a number or None; raise ValueError for what is no CUDA device."""
        if device is None:
            return self.current
        if isinstance(device, bool) or not isinstance(device, (int, str, self._torch.device)):
            raise ValueError(f"Expected a torch.device with a specified index or an integer, but got: {device}")
        if isinstance(device, int):
            return device
        parsed = self._torch.device(device)
        if parsed.type != CUDA:
            if optional and parsed.type == "cpu":
                return -1
            if device == self.cpu and not isinstance(device, str):
                return self.current  # where a tensor is, which would be a GPU
            raise ValueError(f"Expected a cuda device, but got: {device}")
        return self.current if parsed.index is None else int(parsed.index)

    def checked(self, index: int) -> int:
        """Return the index, where there is such a GPU; otherwise raise the error that CUDA raises."""
        if not 0 <= index < self.count():
            if self.count() == 0:
                raise RuntimeError("No CUDA GPUs are available")
            raise self._error(
                f"CUDA error: {NO_SUCH_GPU}\n"
                f"(device {index} was asked for; the node of this rehearsal has {self.count()})"
            )
        return index

    def is_cuda(self, device: Any) -> bool:
        """Return whether a device argument names CUDA; a bare index means the accelerator."""
        if isinstance(device, self._torch.device):
            return bool(device.type == CUDA)
        if isinstance(device, str):
            return device == CUDA or device.startswith("cuda:")
        return isinstance(device, int) and not isinstance(device, bool)

    def on_cpu(self, device: Any) -> Any:
        """Return the CPU for a CUDA device that exists, any other argument itself; raise what CUDA would raise."""
        if not self.is_cuda(device):
            return device
        self.use(device)
        return self.cpu

    def use(self, device: Any) -> int:
        """Check a device that a tensor goes to, note its first use, and return its index."""
        index = self.checked(self.index(device))
        named = device is not None and (isinstance(device, int) or self._torch.device(device).index is not None)
        key = (index, "explicit" if named else "current")
        if key not in self._used:
            self._used.add(key)
            self._note_use(*key)
        return index
