"""How deep an analysis of a script may go, and what it left out, told to whoever asks for its answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.source.script import Script

RECURSION_LIMIT = 12_000
"""Enough for sums of 3,000 terms."""


@contextmanager
def deep_recursion(depth: int = RECURSION_LIMIT) -> Iterator[None]:
    """Allow for code that is nested deeply: a long sum is as deep as it has terms."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, depth))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def note_gap(script: Script, text: str) -> None:
    """Keep, in a sentence, that what is being answered may be incomplete."""
    script.__dict__["_gap"] = text


def take_gap(script: Script) -> str:
    """What was noted since the last call; empty when nothing was."""
    gap: str = script.__dict__.pop("_gap", "")
    return gap
