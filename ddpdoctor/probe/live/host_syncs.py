"""The lines of the user's that read a result back from the GPU, and how long they wait for it, counted for some steps.

The methods of ``torch.Tensor`` are replaced for these steps alone, and only where a model is trained on a GPU; before
and after them a read costs nothing. What an evaluation between two steps reads is not counted.
"""

from __future__ import annotations

from threading import get_ident
from types import CodeType, FrameType
from typing import Any, Callable

from ..facts.tensor_reads import follow_reads, user_reader
from .observer import Observer
from .timing.steps import ACTIVE, STEPPED

FIRST_AFTER = 20
"""Steps before the first that is sampled: by then what is compiled is compiled."""
SAMPLED = 20
MOST_PLACES = 50


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
        """As ``follow_reads`` returns it."""
        self._places: dict[tuple[str, CodeType, int], Place] = {}
        self.is_over = False

    def waits_for_gpu(self, tensor: Any) -> bool:
        """Return whether reading a tensor waits for a GPU."""
        return bool(tensor.is_cuda)

    def forward_begins(self, step: int) -> None:
        """Begin or end the sampling where a training forward of a model on a GPU begins, in the step of this number."""
        if not self._first:
            self._first = step + FIRST_AFTER
        elif step >= self._first + SAMPLED:
            self.finish(step)
        elif step >= self._first and not self._installed:
            self._first = step
            self._installed = follow_reads(
                self._observer.journal, self._tensor_class, self._is_watched, self._note_read
            )

    def finish(self, step: int) -> None:
        """Stop sampling before the step of this number, and report what was seen."""
        if self.is_over:
            return
        self.is_over = True
        for name, (replacement, own) in self._installed.items():
            if self._tensor_class.__dict__.get(name) is not replacement:
                continue  # Other code has replaced ours, and calls it.
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

    def _is_watched(self) -> bool:
        return not self.is_over and not self._is_compiling() and self._observer.thread == get_ident()

    def _note_read(self, name: str, tensor: Any, frame: FrameType, wait_ns: int) -> None:
        steps = self._observer.steps
        self._observer.moments.take_in()
        if steps.state not in (ACTIVE, STEPPED) or not self.waits_for_gpu(tensor):
            return
        reader = user_reader(frame, self._observer.journal.user_code)
        if reader is None:
            return
        key = (name, reader.f_code, reader.f_lasti)
        place = self._places.get(key)
        if place is None:
            if len(self._places) >= MOST_PLACES:
                return
            place = self._places[key] = Place(self._observer.journal.site(reader))
        place.calls += 1
        place.wait_ns += wait_ns
        if steps.current != place.newest:
            place.newest = steps.current
            place.steps += 1
