"""Tensors that a collective changed in place and that come back as, or below, the root of a backward."""

from __future__ import annotations

from typing import Any

from ...journal import Journal

KINDS = frozenset({"all_reduce", "reduce"})
NODES_SEARCHED = 64
"""Nodes of the graph, counted from the loss, among which the reduced tensor is looked for."""
GRAPHS_HELD = 2
"""Graphs are kept alive by at most so many tensors, until the next backward."""


class ReducedLosses:
    """What was reduced since the last backward."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._reduced: list[tuple[Any, int]] = []
        """Graph node of the tensor, and the call chain of the collective."""

    def note(self, kind: str, tensors: tuple[Any, ...], site: int) -> None:
        """Note a collective of the user's that is about to change these tensors."""
        if kind not in KINDS or not tensors:
            return
        node = tensors[0].grad_fn
        if node is not None:
            self._reduced = [*self._reduced[1 - GRAPHS_HELD :], (node, site)]

    def before_backward(self, roots: Any, site: int) -> None:
        """Report what was reduced below ``roots``, a tensor or several from which a backward starts."""
        reduced, self._reduced = self._reduced, []
        if not reduced:
            return
        tensors = roots if isinstance(roots, (list, tuple)) else (roots,)
        nodes = [tensor.grad_fn for tensor in tensors if getattr(tensor, "grad_fn", None) is not None]
        for node in nodes:
            below = [one for one, _ in node.next_functions if one is not None]
            # A scaled loss is still the loss; one term of a sum may have been reduced after it was added up.
            if len(below) == 1 and len(nodes) < NODES_SEARCHED:
                nodes += below
        for node, place in reduced:
            if any(node is found for found in nodes):
                self._journal.event("reduced_loss", site=place, backward_site=site)
