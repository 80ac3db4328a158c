"""How deep the code of a script may be nested."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
