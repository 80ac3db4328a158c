"""Counts the open `join()` contexts: inside of one the ranks may draw different numbers of batches."""

from __future__ import annotations

import functools
from typing import Any


class Joins:
    """The enabled contexts of this process."""

    def __init__(self) -> None:
        self.open = 0

    def install(self) -> None:
        """Patch the class, where this torch has it."""
        try:
            from torch.distributed.algorithms.join import Join
        except ImportError:
            return
        enter, leave, joins = Join.__enter__, Join.__exit__, self

        @functools.wraps(enter)
        def __enter__(join: Any) -> Any:
            joins.open += bool(getattr(join, "_enable", True))
            return enter(join)

        @functools.wraps(leave)
        def __exit__(join: Any, *error: Any) -> Any:
            joins.open -= bool(getattr(join, "_enable", True))
            return leave(join, *error)

        Join.__enter__, Join.__exit__ = __enter__, __exit__
