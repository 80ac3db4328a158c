"""Which question a ``len(loader)`` in a script asks: how long training is, or where the loop over this pass ends.

Schedules, intervals and averages are made of the true length and break on another. A loop that ends by the length has
to be told the one that it will meet. The source of the asking line tells them apart.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple, Optional

COUNTING_FRAMEWORKS = ("lightning", "pytorch_lightning", "transformers")
"""Their trainers ask for the length in order to know a pass's last batch."""
_MOST_CALLERS = 4
_MOST_NAMES = 3
"""Assignments through which a length is followed."""


class Source(NamedTuple):
    """What is read of a file."""

    parents: dict[ast.AST, ast.AST]
    """The parent of every node."""
    counters: frozenset[str]
    """Names and attributes that loops count with."""


class Lengths:
    """Reads the lines that ask, each once."""

    def __init__(self) -> None:
        self._sources: dict[str, Optional[Source]] = {}
        self._answers: dict[tuple[object, int], bool] = {}

    def seeks_end(self, frame: Optional[FrameType]) -> bool:
        """Tell whether the code at ``frame``, which asks for a length, looks for the end of a pass by it."""
        for _ in range(_MOST_CALLERS):
            if frame is None:
                return False
            if str(frame.f_globals.get("__name__", "")).partition(".")[0] in COUNTING_FRAMEWORKS:
                return True
            if frame.f_code.co_name != "__len__":
                break
            # A wrapper passes on what it was asked itself.
            frame = frame.f_back
        if frame is None:
            return False
        key = (frame.f_code, frame.f_lasti)
        known = self._answers.get(key)
        if known is None:
            known = self._answers[key] = self._look(frame)
        return known

    def _look(self, frame: FrameType) -> bool:
        name = frame.f_code.co_filename
        if name not in self._sources:
            try:
                tree = ast.parse("".join(linecache.getlines(name, frame.f_globals)))
                self._sources[name] = read(tree)
            except (SyntaxError, ValueError, RecursionError):
                self._sources[name] = None
        source = self._sources[name]
        if source is None:
            return False
        line, column = _position(frame)
        calls = [node for node in source.parents if _is_length(node) and _covers(node, line)]
        calls = [call for call in calls if _starts(call) == (line, column)] or calls
        return bool(calls) and all(ends_a_loop(call, source) for call in calls)


def read(tree: ast.AST) -> Source:
    """Take down what the judgement needs of a parsed file."""
    parents, counters = {}, set()
    for node in ast.walk(tree):
        parents.update(dict.fromkeys(ast.iter_child_nodes(node), node))
        if isinstance(node, (ast.For, ast.AsyncFor, ast.AugAssign)):
            targets = ast.walk(node.target)
            counters |= {getattr(target, "id", getattr(target, "attr", "")) for target in targets}
    return Source(parents, frozenset(counters - {""}))


def ends_a_loop(node: ast.AST, source: Source) -> bool:
    """Tell whether an expression, a length, is used to find the end of a loop, and for nothing that it could break."""
    uses = list(_uses(node, source, _MOST_NAMES))
    return "end" in uses and "other" not in uses


def _uses(node: ast.AST, source: Source, names_left: int) -> Iterator[str]:
    """Yield what a length is used for: ``end``, ``harmless`` or ``other``."""
    parent = source.parents.get(node)
    if isinstance(parent, ast.BinOp):
        yield from _uses_in_arithmetic(node, parent, source, names_left)
    elif isinstance(parent, ast.Compare):
        sides = [side for side in (parent.left, *parent.comparators) if side is not node]
        yield "end" if all(_counts(side, source) for side in sides) else "other"
    elif isinstance(parent, ast.Call) and node in parent.args:
        yield _use_in_call(parent, source)
    elif isinstance(parent, ast.keyword):
        yield "harmless" if parent.arg in ("total", "desc", "length") else "other"
    elif isinstance(parent, ast.FormattedValue):
        yield "harmless"
    elif isinstance(parent, ast.Assign) and names_left and all(isinstance(name, ast.Name) for name in parent.targets):
        for target in parent.targets:
            yield from _uses_of_name(getattr(target, "id", ""), parent, source, names_left - 1)
    else:
        yield "other"


def _uses_in_arithmetic(node: ast.AST, parent: ast.BinOp, source: Source, names_left: int) -> Iterator[str]:
    if isinstance(parent.op, (ast.Add, ast.Sub)) and node is parent.left and isinstance(parent.right, ast.Constant):
        yield from _uses(parent, source, names_left)
    elif isinstance(parent.op, ast.Mod) and node is parent.right and _counts(parent.left, source):
        yield "end"
    else:
        yield "harmless" if isinstance(parent.op, (ast.Div, ast.Mod)) and node is parent.right else "other"


def _use_in_call(call: ast.Call, source: Source) -> str:
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    if name in ("print", "info", "debug", "format"):
        return "harmless"
    if name != "range":
        return "other"
    loop: Optional[ast.AST] = call
    while isinstance(loop, ast.expr):
        loop = source.parents.get(loop)
    # A loop that draws by itself: `for i in range(len(loader)): batch = next(batches)`.
    draws = isinstance(loop, ast.For) and any(_draws(node) for item in loop.body for node in ast.walk(item))
    return "end" if draws else "other"


def _uses_of_name(name: str, assignment: ast.AST, source: Source, names_left: int) -> Iterator[str]:
    scope: ast.AST = assignment
    while scope in source.parents and not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        scope = source.parents[scope]
    for node in ast.walk(scope):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            yield from _uses(node, source, names_left)


def _counts(side: ast.AST, source: Source) -> bool:
    """Tell whether an expression is a loop's counter, perhaps with arithmetic around it, and no call."""
    nodes = list(ast.walk(side))
    names = {getattr(node, "id", getattr(node, "attr", "")) for node in nodes}
    return bool(names & source.counters) and not any(isinstance(node, ast.Call) for node in nodes)


def _draws(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return "next" in str(getattr(node.func, "id", getattr(node.func, "attr", "")))


def _is_length(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return getattr(node.func, "id", "") == "len" or getattr(node.func, "attr", "") == "__len__"


def _starts(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", -1)


def _covers(node: ast.AST, line: int) -> bool:
    first = getattr(node, "lineno", 0)
    return bool(first <= line <= (getattr(node, "end_lineno", None) or first))


def _position(frame: FrameType) -> tuple[int, int]:
    """Line and column of what the frame executes; the column is -1 where this Python does not know it."""
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is not None:
        for index, (line, _, column, _) in enumerate(positions()):
            if index == frame.f_lasti // 2:
                return line or frame.f_lineno, -1 if column is None else column
    return frame.f_lineno, -1
