"""Which dictionary a tensor was put together from, when a function stacks a dictionary's values and reduces them.

Where ranks then reduce different numbers of elements, the dictionary has other keys on each of them.
"""

from __future__ import annotations

import ast
from types import FrameType
from typing import Optional

from ...journal import Journal
from .user_lines import covering, tree_around

MOST_ENTRIES = 100
MOST_VARIABLES = 200
"""Variables of a function among which the dictionary is looked for."""

_PUTS_TOGETHER = frozenset({"stack", "cat", "concat", "hstack", "tensor", "as_tensor", "FloatTensor"})


class DictEntries:
    """Whether each call chain reduces what its function has put together."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._put_together: dict[int, bool] = {}

    def entries_of(self, site: int, frame: Optional[FrameType], elements: int) -> str:
        """Return the name of the dictionary with as many entries as a tensor has elements, or an empty text."""
        if self.has_none(site):
            return ""
        while frame is not None and not self._journal.user_code.holds(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return ""
        if site not in self._put_together:
            self._put_together[site] = False
            self._put_together[site] = puts_together(tree_around(frame), frame.f_lineno)
        if not self._put_together[site] or not 0 < elements <= MOST_ENTRIES:
            return ""
        variables = list(frame.f_locals.items())[:MOST_VARIABLES]
        fitting = (name for name, held in variables if isinstance(held, dict) and len(held) == elements)
        return next((name for name in fitting if not name.startswith("_")), "")

    def has_none(self, site: int) -> bool:
        """Return whether this call chain is known to reduce nothing that its function has put together."""
        return self._put_together.get(site) is False


def puts_together(tree: ast.AST, line: int) -> bool:
    """Return whether a call at a line is given a variable that its function makes by ``torch.stack`` or the like."""
    nodes = covering(tree, line)
    given = {
        argument.id
        for call in nodes
        if isinstance(call, ast.Call)
        for argument in call.args
        if isinstance(argument, ast.Name)
    }
    functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inside = max(functions, key=lambda function: function.lineno) if functions else tree
    return any(
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id in given for target in node.targets)
        and any(isinstance(call, ast.Call) and _last_name(call.func) in _PUTS_TOGETHER for call in ast.walk(node.value))
        for node in ast.walk(inside)
    )


def _last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
