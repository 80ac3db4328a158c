"""What stands at a line of the user's code, for the collectives that a rehearsal looks at more closely."""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache
from types import FrameType

TREES_KEPT = 8
"""Collectives of a few files come in turn, which need not be parsed anew for each of their lines."""


def tree_around(frame: FrameType) -> ast.AST:
    """Return the file that a frame runs."""
    return _parsed("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))


def covering(tree: ast.AST, line: int) -> list[ast.AST]:
    """Return the statements and expressions that a line is part of."""
    return [node for node in ast.walk(tree) if covers(node, line)]


@lru_cache(maxsize=TREES_KEPT)
def _parsed(text: str) -> ast.AST:
    return ast.parse(text)


def covers(node: ast.AST, line: int) -> bool:
    """Return whether a line is part of a statement or an expression."""
    first = getattr(node, "lineno", None)
    return first is not None and first <= line <= (getattr(node, "end_lineno", None) or first)
