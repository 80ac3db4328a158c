"""An iterator over a loader that ends after a few batches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Optional, Protocol

from ..schedule import Trail


class CutShort(StopIteration):
    """The end of a pass that we cut: a loop ends by it, a bare ``next`` lets it through to be recognised."""


class Owner(Protocol):
    """What decides over the passes."""

    def is_over(self, trail: Trail) -> bool:
        """Return whether the pass has yielded what it may."""

    def drawn(self, trail: Trail) -> None:
        """Count a batch of the pass."""

    def is_counted(self, trail: Trail, frame: FrameType) -> bool:
        """Return whether ``frame``, which draws one batch more, counts its batches instead of awaiting an end."""

    def may_go_on(self, trail: Trail) -> bool:
        """Return whether a pass with batches that are counted may yield more than others."""

    def was_cut(self, trail: Trail, frame: FrameType, end: str) -> None:
        """Leave the user's code where ``frame`` cannot go on without more batches."""

    def is_looped(self, frame: FrameType) -> bool:
        """Return whether a ``for`` statement of the user's draws the batch."""

    def hand_out(self, trail: Trail, batch: Any, inner: Any) -> Any:
        """Return the batch that the script gets, which is the one that was drawn unless the rehearsal is a stress."""

    def finish(self, trail: Trail, inner: Any, end: str) -> None:
        """End the pass."""


class ShortPass:
    """An iterator that ends when its owner decides so; everything else is that of the real one."""

    def __init__(self, owner: Owner, trail: Trail, inner: Iterator[Any]) -> None:
        self._owner = owner
        self._inner = inner
        self._trail = trail

    def __iter__(self) -> ShortPass:
        return self

    def __next__(self) -> Any:
        owner, trail = self._owner, self._trail
        if owner.is_over(trail):
            frame = sys._getframe(1)
            end = "counted" if owner.is_counted(trail, frame) else "cut"
            if end == "cut" or not owner.may_go_on(trail):
                owner.finish(trail, self._inner, end)
                owner.was_cut(trail, frame, end)
                raise CutShort
        try:
            batch = next(self._inner)
        except StopIteration:
            owner.finish(trail, self._inner, "exhausted")
            raise
        owner.drawn(trail)
        if trail.looped:
            trail.looped = owner.is_looped(sys._getframe(1))
        return owner.hand_out(trail, batch, self._inner)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # a copy that is not yet filled
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __del__(self) -> None:
        try:
            self._owner.finish(self._trail, self._inner, "abandoned")
        except Exception:
            return


def is_cut(error: BaseException) -> bool:
    """Return whether an exception is the end of a pass that we cut, or was made of it."""
    seen: set[int] = set()
    step: Optional[BaseException] = error
    while step is not None and id(step) not in seen:
        if isinstance(step, CutShort):
            return True
        seen.add(id(step))
        step = step.__cause__
    return False
