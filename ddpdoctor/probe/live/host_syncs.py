"""Counts for some steps the lines of the user's that read a result back from the GPU, and how long they wait for it.

The methods of ``torch.Tensor`` are replaced for these steps alone, and only where a model is trained on a GPU; before
and after them a read costs nothing. What an evaluation between two steps reads is not counted.
"""

from __future__ import annotations

import functools
import sys
import time
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, Callable, Optional

from ..user_code import leave_no_frame
from .observer import Observer
from .timing.steps import ACTIVE, STEPPED

METHODS = ("item", "cpu", "tolist", "__bool__", "__float__", "__int__")
FIRST_AFTER = 20
"""Steps before the first that is sampled: by then what is compiled is compiled."""
SAMPLED = 20
MOST_PLACES = 50
_PRINTING = ("/torch/_tensor_str.py", "/torch/_tensor.py")
"""The files of torch through which a tensor is printed or formatted."""
_now_ns = time.monotonic_ns


class Place:
    """One line that reads in one way."""

    __slots__ = ("calls", "newest", "site", "steps", "wait_ns")

    def __init__(self, site: int) -> None:
        self.site = site
        self.calls = self.steps = self.newest = self.wait_ns = 0


class HostReads:
    """The sampling of one rank."""

    def __init__(self, observer: Observer, torch: Any, is_compiling: Callable[[], bool]) -> None:
        self._observer = observer
        self._tensor_class = torch.Tensor
        self._is_compiling = is_compiling
        self._first = 0
        """The first step that is sampled; 0 before the first training forward."""
        self._installed: dict[str, tuple[Any, Any]] = {}
        """What was put in the place of each method, and what the class itself had there; None for what it inherits."""
        self._places: dict[tuple[str, CodeType, int], Place] = {}
        self.is_over = False

    def waits_for_gpu(self, tensor: Any) -> bool:
        """Tell whether reading a tensor waits for a GPU."""
        return bool(tensor.is_cuda)

    def forward_begins(self, step: int) -> None:
        """A training forward of a model on a GPU begins, in the step of this number."""
        if not self._first:
            self._first = step + FIRST_AFTER
        elif step >= self._first + SAMPLED:
            self.finish(step)
        elif step >= self._first and not self._installed:
            self._first = step
            self._install()

    def finish(self, step: int) -> None:
        """Stop sampling before the step of this number, and tell what was seen."""
        if self.is_over:
            return
        self.is_over = True
        for name, (replacement, own) in self._installed.items():
            if self._tensor_class.__dict__.get(name) is not replacement:
                continue  # Somebody else has replaced ours, and calls it.
            if own is None:
                delattr(self._tensor_class, name)
            else:
                setattr(self._tensor_class, name, own)
        steps = step - self._first
        for (name, _, _), place in self._places.items():
            if steps > 0:
                self._observer.journal.event(
                    "host_read",
                    method=name,
                    site=place.site,
                    calls=place.calls,
                    steps_with=min(place.steps, steps),
                    steps=steps,
                    wait_ns=place.wait_ns,
                )

    def _install(self) -> None:
        for name in METHODS:
            method = getattr(self._tensor_class, name, None)
            if method is not None:
                replacement = self._counted(name, method)
                self._installed[name] = replacement, self._tensor_class.__dict__.get(name)
                setattr(self._tensor_class, name, replacement)

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        reads, observer, is_compiling = self, self._observer, self._is_compiling

        @functools.wraps(method)
        def read(tensor: Any, *arguments: Any, **options: Any) -> Any:
            if reads.is_over or is_compiling() or observer.thread != get_ident():
                return method(tensor, *arguments, **options)
            begun_ns = _now_ns()
            try:
                return method(tensor, *arguments, **options)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                observer.journal.guarded(
                    reads._note_read,
                    name,
                    tensor,
                    sys._getframe(1),
                    _now_ns() - begun_ns,
                    harms=("host_reads", "tensor_reads"),
                )

        return read

    def _note_read(self, name: str, tensor: Any, frame: Optional[FrameType], wait_ns: int) -> None:
        steps = self._observer.steps
        self._observer.moments.take_in()
        if steps.state not in (ACTIVE, STEPPED) or not self.waits_for_gpu(tensor):
            return
        while frame is not None and frame.f_code.co_filename.endswith(_PRINTING):
            frame = frame.f_back
        if frame is None or not self._observer.journal.user_code.holds(frame.f_code.co_filename):
            return  # A library reads: a scaler, a trainer's log.
        key = (name, frame.f_code, frame.f_lasti)
        place = self._places.get(key)
        if place is None:
            if len(self._places) >= MOST_PLACES:
                return
            place = self._places[key] = Place(self._observer.journal.site(frame))
        place.calls += 1
        place.wait_ns += wait_ns
        if steps.current != place.newest:
            place.newest = steps.current
            place.steps += 1
