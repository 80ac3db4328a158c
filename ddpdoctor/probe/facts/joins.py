"""Counts the open `join()` contexts: inside of one the ranks may draw different numbers of batches."""

from __future__ import annotations

from types import FrameType
from typing import Any

from ..call_listeners import on_call
from ..journal import Journal


class Joins:
    """The enabled contexts of this process."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.open = 0

    def install(self) -> None:
        """Listen to the class, where this torch has it."""
        try:
            from torch.distributed.algorithms.join import Join
        except ImportError:
            return
        on_call(self._journal, Join, "__enter__", before=self._entered, harms=("passes",))
        on_call(self._journal, Join, "__exit__", before=self._left, harms=("passes",))

    def _entered(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.open += bool(getattr(arguments[0], "_enable", True))

    def _left(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.open -= bool(getattr(arguments[0], "_enable", True))
