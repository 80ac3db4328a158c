"""The lines of the user's files that ranks ran."""

from __future__ import annotations

import msgspec


class LinesExecuted(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of a user's file that a rank ran."""

    rank: int
    file: str
    lines: frozenset[int] = frozenset()
    unwatched: frozenset[int] = frozenset()
    """First lines of functions that ran so much that only part of what they did is known."""
    by_chance: frozenset[int] = frozenset()
    """Those of ``lines`` that were run first when only the clock decided how far the script would come."""
    late: bool = False
    """Only lines that ran after a model was wrapped or a loader drawn from are known."""
