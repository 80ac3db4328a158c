"""Whether code that draws a batch is prepared for the end of the pass, or counts on there being one more."""

from __future__ import annotations

import ast
import linecache
import opcode
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Optional

from ..collectives.user_lines import covering, covers

_FOR_ITER = opcode.opmap["FOR_ITER"]
_GENERATOR = 0x20 | 0x200
_CATCHING = frozenset({"StopIteration", "Exception", "BaseException"})


def awaits_end(frame: FrameType, is_users: Callable[[str], bool]) -> bool:
    """Return whether anything on the stack from ``frame``, which draws, would take a ``StopIteration``; True in doubt.

    Loops do, and handlers that do not raise again. A library in between may.
    """
    frames = list(_outwards(frame))
    while frames and not is_users(frames[-1].f_code.co_filename):
        frames.pop()
    if not frames:
        return True
    return any(
        not is_users(one.f_code.co_filename)
        or one.f_code.co_code[one.f_lasti] == _FOR_ITER
        or bool(one.f_code.co_flags & _GENERATOR)
        or _is_prepared(one, draws=one is frame)
        for one in frames
    )


def _outwards(frame: Optional[FrameType]) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_prepared(frame: FrameType, *, draws: bool) -> bool:
    """Return whether the line that a frame is at stands under a handler of the end, or draws with a default."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    except (SyntaxError, ValueError, RecursionError):
        return True
    around = covering(tree, frame.f_lineno)
    return not around or any(
        _suppresses(node)
        or (draws and _draws_with_default(node))
        or any(_catches(handler) for handler in getattr(node, "handlers", ()) if _is_tried(node, frame.f_lineno))
        for node in around
    )


def _is_tried(node: ast.AST, line: int) -> bool:
    return any(covers(statement, line) for statement in getattr(node, "body", ()))


def _catches(handler: ast.ExceptHandler) -> bool:
    if handler.body and isinstance(handler.body[-1], ast.Raise):
        return False
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = [getattr(kind, "id", getattr(kind, "attr", None)) for kind in kinds]
    return any(name is None or name in _CATCHING for name in names)


def _suppresses(node: ast.AST) -> bool:
    return isinstance(node, ast.With) and any("suppress" in ast.dump(item.context_expr) for item in node.items)


def _draws_with_default(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "next" and len(node.args) > 1
