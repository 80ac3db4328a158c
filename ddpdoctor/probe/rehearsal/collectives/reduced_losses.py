"""Collectives in the graph of the loss: changed in place on the way to a backward, or an end of the graph."""

from __future__ import annotations

import sys
from typing import Any

from ...journal import Journal

KINDS = frozenset({"all_reduce", "reduce"})
GATHERS = frozenset({"all_gather", "all_gather_into_tensor"})
"""Their results are leaves of the graph, whatever their inputs are."""
NODES_SEARCHED = 64
"""Nodes of the graph, counted from the loss, among which the reduced tensor is looked for."""
NODES_WALKED = 50_000
"""Nodes of the graph below a gather, which is walked once a call chain: 20,000 take 30 ms."""
GRAPHS_HELD = 2
"""Graphs are kept alive by at most so many tensors, until the next backward."""


class ReducedLosses:
    """What was reduced since the last backward."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._reduced: list[tuple[Any, int]] = []
        """Graph node of the tensor, and the call chain of the collective."""
        self._cut: set[int] = set()
        """Call chains of the gathers that were reported."""

    def note(self, kind: str, tensors: tuple[Any, ...], site: int) -> None:
        """Note a collective of the user's that is about to change these tensors."""
        if kind in GATHERS and tensors and site not in self._cut and _wants_gradient(tensors[0]):
            self._cut.add(site)
            leaves = [list(leaf.shape) for tensor in tensors for leaf in _leaves(tensor.grad_fn)]
            self._journal.event("cut_graph", site=site, kind=kind, leaves=leaves)
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


def _wants_gradient(tensor: Any) -> bool:
    # What carries gradients gathers inside of an autograd function, in which none are recorded.
    return bool(tensor.requires_grad and sys.modules["torch"].is_grad_enabled())


def _leaves(node: Any) -> list[Any]:
    """Return the parameters below a node of the graph; none where there are too many nodes."""
    found: dict[int, Any] = {}
    seen, waiting = {node}, [node]
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
        for below, _ in getattr(node, "next_functions", ()):
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
        if len(seen) > NODES_WALKED:
            return []
    return list(found.values())
