"""The calls in the user's files that could average a model, so that those not reached yet are known."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Set

from ...journal import Journal

AVERAGING = frozenset(
    {
        "all_reduce",
        "all_reduce_coalesced",
        "allreduce",
        "average_parameters",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
    }
)
"""Last names of functions that average what they are given, or the larger half of doing so."""
MOST_FILES = 200
MOST_BYTES = 2_000_000


def note_written_averages(journal: Journal) -> None:
    """Write file and line of each such call in the user's modules that are loaded by now."""
    journal.event("written_averages", places=sorted(set(calls_written(journal, AVERAGING))))


def calls_written(journal: Journal, names: Set[str]) -> Iterator[tuple[str, int]]:
    """Yield file and line of each call of a function with such a last name in the user's loaded modules."""
    left = MOST_BYTES
    library = os.path.dirname(os.__file__) + os.sep
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    # Most of what is loaded is known at a glance to be no file of the user's.
    near = (file for file in files if isinstance(file, str) and "site-packages" not in file)
    own = [file for file in near if not file.startswith(library) and journal.user_code.holds(file)]
    for file in sorted(file for file in own if file.endswith(".py") and os.path.isfile(file))[:MOST_FILES]:
        left -= os.path.getsize(file)
        if left < 0:
            return
        with open(file, "rb") as source:
            tree = ast.parse(source.read())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _last_name(node.func) in names:
                yield os.path.abspath(file), node.lineno


def _last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
