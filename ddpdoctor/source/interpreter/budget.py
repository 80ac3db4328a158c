"""How much work a rank projection does: which functions are walked again, and what stands for those that are not.

A function is walked at every call of it, because what it does depends on its arguments. Calls within calls and loops
would make that exponential, so that walks are counted: past the bounds a call gives what earlier walks of the same
function gave. Every function is walked at least once, which keeps the work in proportion to the length of the code.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ddpdoctor.source.events import Item, shape_of
from ddpdoctor.source.interpreter.values import NONE, OPAQUE, Value

MAXIMUM_STEPS = 50_000
"""Statements and expressions, repeated walks included, after which nothing is walked a second time: half a second."""
MOST_WALKS = 250
"""Walks of one function that are always made."""
MOST_STEPS = 2_500
"""Statements and expressions in one function, those of the functions that it calls included, that are always walked."""
ALIKE_WALKS = 4
"""Walks of one function, all with one result and the same collectives, after which these are its summary."""
WALKS_GIVEN = 2
"""Walks, given something of a batch, of a function that returns nothing, before its summary stands for such a call."""
ALIKE_STEPS = 120
"""Statements and expressions in those walks: smaller functions cost less than it takes to remember them."""
MAXIMUM_DEPTH = 40
"""Calls within calls."""
MAXIMUM_BARREN_WALKS = 4
"""Walks after which a function that never did anything of interest is passed over."""
LONGEST_KEPT = 50
"""Collectives and branches of a walk that are kept to stand for later calls."""


class Walks:
    """The results of the walks of one function."""

    __slots__ = ("alike", "count", "ended", "given", "items", "kept", "result", "silent", "steps")

    def __init__(self) -> None:
        self.count = 0
        self.ended = 0
        """Walks that ended: a recursive function is in the middle of others."""
        self.steps = 0
        self.kept = False
        """Some walk is certain to be kept: it is in no turn of a loop that may be taken back."""
        self.silent = True
        """No walk ran a collective."""
        self.alike = True
        """Every walk returned the same and ran the same collectives."""
        self.given: dict[bool, int] = {}
        """Walks by whether they were given what comes from a batch."""
        self.result: Value = OPAQUE
        self.items: Sequence[Sequence[Item]] = ()
        """What each rank did in the last walk that all ranks made together; empty when there was none so short."""


class Effort:
    """The count of a projection's work by function."""

    def __init__(self) -> None:
        self.walks: dict[ast.AST, Walks] = {}
        self.cut: dict[ast.AST, str] = {}
        """Functions of which some call was not followed, with their names and files."""
        self.trials = 0
        """How many turns of loops around the present statement may be taken back."""

    def passes_over(self, node: ast.AST, steps: int, of_batch: bool) -> Walks | None:
        """Return the walks that replace one more walk of a function; None where it is walked. ``steps`` are done.

        A function that returns nothing is there for what it prints or writes: one that has printed settings so far is
        walked once more for a loss.
        """
        walks = self.walks.get(node)
        if walks is None:
            return None
        summarised = walks.alike and walks.ended >= ALIKE_WALKS and walks.steps >= ALIKE_STEPS
        summarised = summarised and not (of_batch and walks.result == NONE and walks.given.get(True, 0) < WALKS_GIVEN)
        worn_out = walks.count >= MOST_WALKS and walks.steps >= MOST_STEPS
        return walks if summarised or worn_out or steps > MAXIMUM_STEPS else None

    def note(
        self,
        node: ast.AST,
        steps: int,
        result: Value,
        items: Sequence[Sequence[Item]] | None,
        *,
        began: bool = False,
        ran_nothing: bool = True,
        of_batch: bool = False,
    ) -> None:
        """Count a walk as soon as it begins, and keep its result; ``items`` when all ranks made it together."""
        walks = self.walks.get(node)
        if walks is None:
            walks = self.walks[node] = Walks()
        if began:
            walks.count += 1
            return
        walks.steps += steps
        walks.ended += 1
        walks.kept = walks.kept or not self.trials
        walks.given[of_batch] = walks.given.get(of_batch, 0) + (1 if self.trials else WALKS_GIVEN)
        walks.silent = walks.silent and ran_nothing
        if items is not None and sum(map(len, items)) <= LONGEST_KEPT:
            if walks.alike and walks.ended > 1:
                walks.alike = walks.result == result and _shapes(walks.items) == _shapes(items)
            walks.items, walks.result = items, result
        else:
            walks.alike = False

    def take_back(self) -> None:
        """Leave one more walk to each function of which none was kept: what it did is taken back with its loop."""
        for walks in self.walks.values():
            if not walks.kept:
                walks.ended = min(walks.ended, ALIKE_WALKS - 1)
            if 0 < walks.given.get(True, 0) < WALKS_GIVEN:
                walks.given[True] = 0

    def cut_functions(self) -> str:
        """Return the names of the functions that were not followed at every call; empty when all were."""
        names = list(dict.fromkeys(self.cut.values()))
        more = f" and {len(names) - 3} more functions" if len(names) > 3 else ""
        return ", ".join(names[:3]) + more


def _shapes(items: Sequence[Sequence[Item]]) -> tuple[int, ...]:
    return tuple(shape_of(tuple(entries)) for entries in items)
