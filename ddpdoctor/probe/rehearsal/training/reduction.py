"""Reduced gradients, losses and averages of a rehearsal: what DDP reduces, and what the script does."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Set
from math import isfinite, prod
from typing import Any, Optional
from weakref import ReferenceType, ref

from ...journal import Journal

# The calls in the user's files that could average a model, so that those not reached yet are known.

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
MOST_FILES = 1_000
"""Files that are read: 50 ms."""
MOST_BYTES = 2_000_000
"""Of those that are parsed, as one of the names is in them."""
NOT_SEARCHED = ("", 0)


def note_written_averages(journal: Journal) -> None:
    """Write file and line of each such call in the user's modules that are loaded by now."""
    places = set(calls_written(journal, AVERAGING)) - {NOT_SEARCHED}
    journal.event("written_averages", places=sorted(places))


def calls_written(journal: Journal, names: Set[str]) -> Iterator[tuple[str, int]]:
    """Yield file and line of each call of a function with such a last name in the user's loaded modules.

    ``NOT_SEARCHED`` stands for what was too much to search.
    """
    left, spelled = MOST_BYTES, [name.encode() for name in names]
    library = os.path.dirname(os.__file__) + os.sep
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    # Most of what is loaded is known at a glance to be no file of the user's.
    near = (file for file in files if isinstance(file, str) and "site-packages" not in file)
    own = [file for file in near if not file.startswith(library) and journal.user_code.holds(file)]
    found = sorted(file for file in own if file.endswith(".py") and os.path.isfile(file))
    if len(found) > MOST_FILES:
        yield NOT_SEARCHED
    for file in found[:MOST_FILES]:
        with open(file, "rb") as source:
            text = source.read()
        # A syntax tree takes 30 ms a file and rank; in plain ASCII no name is in it that is not in the text.
        if text.isascii() and not any(name in text for name in spelled):
            continue
        left -= len(text)
        if left < 0:
            yield NOT_SEARCHED
            return
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and last_name(node.func) in names:
                yield os.path.abspath(file), node.lineno


def last_name(function: ast.expr) -> str:
    """Return the last name of what is called; empty for anything but a name or an attribute."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


# Collectives in the graph of the loss: changed in place on the way to a backward, or an end of the graph.

KINDS = frozenset({"all_reduce", "reduce"})
GATHERS = frozenset({"all_gather", "all_gather_into_tensor"})
"""Their results are leaves of the graph, whatever their inputs are."""
NODES_SEARCHED = 64
"""Nodes of the graph, counted from the loss, among which the reduced tensor is looked for."""
NODES_WALKED = 50_000
"""Nodes of the graph below a gather, which is walked once a call chain: 20,000 take 30 ms."""
GATHERS_WALKED = 4
"""So many of a call chain in one step have their graphs walked."""
NUMBERS_READ = 16
"""Numbers of a tensor that may be counts; a larger one is not looked at."""
COUNTS_NOTED = 4
"""So many times the numbers of a call chain are read."""
TOTALS_NOTED = 128
"""Sums of one tensor after the other that are noted in a process."""
ORDERS_NOTED = 64
"""Orders in memory that are noted in a process."""
GRAPHS_HELD = 2
"""Graphs are kept alive by at most so many tensors, until the next backward."""


class ReducedLosses:
    """What was reduced since the last backward."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._reduced: list[tuple[Any, int]] = []
        """Graph node of the tensor, and the call chain of the collective."""
        self._counted: dict[int, int] = {}
        """How often the numbers of a call chain were read: on a device the rank waits for them."""
        self._summed: dict[int, tuple[ReferenceType[Any], int]] = {}
        """The few numbers that were summed once, by where they lie in memory: a tensor, with a number."""
        self._totals = 0
        self._orders: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
        """The lines, shapes and strides of which the order in memory was noted."""
        self._cut: set[int] = set()
        """Call chains of the gathers that were reported, …"""
        self._gathering: list[int] = []
        """… and those since the last backward: one may gather several tensors in turn."""

    def note(self, kind: str, tensors: tuple[Any, ...], site: int) -> None:
        """Note a collective of the user's that is about to change these tensors."""
        new = kind in GATHERS and site not in self._cut and self._gathering.count(site) < GATHERS_WALKED
        if new and tensors and _wants_gradient(tensors[0]):
            self._gathering.append(site)
            leaves = [list(leaf.shape) for tensor in tensors for leaf in _leaves(tensor.grad_fn)]
            self._journal.event("cut_graph", site=site, kind=kind, leaves=leaves)
        if kind not in KINDS or not tensors:
            return
        node = tensors[0].grad_fn
        if node is not None:
            self._reduced = [*self._reduced[1 - GRAPHS_HELD :], (node, site)]

    def note_counts(self, kind: str, tensors: tuple[Any, ...], site: int, group: int) -> None:
        """Note the whole numbers among the few that are about to be summed over the ranks, a few times a call chain."""
        few = kind in KINDS and len(tensors) == 1 and 0 < tensors[0].numel() <= NUMBERS_READ
        if not few or tensors[0].requires_grad:
            return
        if self._totals < TOTALS_NOTED and not tensors[0].is_complex():
            self._note_total(tensors[0], site, group)
        if self._counted.get(site, 0) >= COUNTS_NOTED:
            return
        self._counted[site] = self._counted.get(site, 0) + 1
        numbers = [int(one) for one in tensors[0].flatten().tolist() if 0 < one < float("inf") and one == int(one)]
        if numbers:
            self._journal.event("reduced_counts", site=site, numbers=numbers)

    def _note_total(self, tensor: Any, site: int, group: int) -> None:
        """Note what a rank gives to a sum by a tensor that may hold an earlier sum."""
        self._totals += 1
        known = self._summed.get(place := tensor.data_ptr())
        if known is None or known[0]() is None:  # As long as that tensor lives, the memory is no other's.
            known = self._summed[place] = ref(tensor), self._totals
        numbers = [float(one) for one in tensor.flatten().tolist()]
        if all(map(isfinite, numbers)):
            version = -1 if tensor.is_inference() else int(tensor._version)  # Collectives leave it as it is.
            self._journal.event(
                "summed_total", site=site, tensor=known[1], own_group=group, numbers=numbers, version=version
            )

    def note_orders(self, kind: str, tensors: tuple[Any, ...], site: int, ranks: tuple[int, ...]) -> None:
        """Note the tensors of a collective whose numbers do not lie in memory as a new tensor's do, once a line."""
        for tensor in tensors:
            if tensor.is_sparse or tensor.is_contiguous():
                continue
            shape, strides = tuple(tensor.shape), tuple(tensor.stride())
            if (key := (site, shape, strides)) not in self._orders and len(self._orders) < ORDERS_NOTED:
                self._orders.add(key)
                steps = sorted((step, size) for step, size in zip(strides, shape) if size > 1)
                gaps = any(step != prod(size for _, size in steps[:at]) for at, (step, _) in enumerate(steps))
                self._journal.event(
                    "memory_order", site=site, kind=kind, shape=shape, strides=strides, gaps=gaps, ranks=ranks
                )

    def before_backward(self, roots: Any, site: int) -> None:
        """Report what was reduced below ``roots``, a tensor or several from which a backward starts."""
        reduced, self._reduced = self._reduced, []
        self._cut.update(self._gathering)
        self._gathering.clear()
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


DEEP_ENOUGH = 3
"""Parameters with gradients that show whether a backward adds to what is there."""


class Reduction:
    """DDP's own rule: a forward that records gradients arms the reduction of the next backward, unless it runs under
    ``no_sync``; each parameter is reduced when its first gradient arrives, and what comes later is not.
    """

    def __init__(self, number: int, names: dict[int, str]) -> None:
        self.number = number
        self.names = names
        """Names of the parameters that DDP listed, by identity."""
        self.arrived: set[int] = set()
        """Parameters that got a gradient since the last forward that recorded gradients, or the last step."""
        self.decision: Optional[bool] = None
        """Whether the last forward armed the reduction; None when there was none since the last step."""
        self.watched: set[int] = set()
        """Parameters with gradients that are listened to."""
        self.site = -1
        self.synchronised_norms: Optional[int] = None
        """SyncBatchNorm layers at the wrap; None where they were not counted."""
        self.training_forwards = 0
        self.last_missing: Optional[tuple[tuple[str, ...], tuple[str, ...]]] = None
        self.local: set[int] = set()
        """Parameters that got a gradient without a reduction since the last one, which DDP's search remembers."""
        self._open_forwards = 0
        self._retained = False
        self._reached = False
        self._again = False
        self._twice = False
        self._now: set[int] = set()
        """Parameters that got a gradient in this backward."""

    def forward_begins(self, synchronises: bool, site: int) -> None:
        """Begin a forward that records gradients."""
        self.decision, self.site = synchronises, site
        self._open_forwards += 1

    def backward_begins(self) -> None:
        """Begin a backward."""
        self._reached = self._again = self._twice = False
        self._now.clear()

    def arrive(self, parameter: int) -> None:
        """Note that a parameter got its gradient."""
        self._reached = True
        self._twice = self._twice or parameter in self._now
        self._now.add(parameter)
        if parameter in self.arrived:
            self._again = True
        else:
            self.arrived.add(parameter)

    def backward_ended(self, retained: bool) -> Optional[str]:
        """Return how the gradients of the backward that just ended fared; None when none of them was this wrap's.

        An empty string: DDP reduced them. ``no-sync``: the forward ran under ``no_sync``. ``again``: they came after
        the reduction, from a graph that was kept or from a second forward. ``twice``: some came twice in this backward.
        ``bypass``: no forward through DDP led to them.
        """
        if not self._reached:
            return None
        had_forward, self._open_forwards = self._open_forwards > 0, max(0, self._open_forwards - 1)
        kept, self._retained = self._retained, retained
        if self.decision is None:
            return "bypass"
        if not self.decision:
            return "no-sync"
        if self._twice:
            return "twice"
        if not self._again:
            return ""
        return "again" if had_forward or kept else "bypass"

    def close(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """End the iteration: forget its gradients, and return the parameters that got none in a reduction, and those
        of them that had got one before it.
        """
        arrived, self.arrived = self.arrived, set()
        if not arrived:
            return (), ()
        synchronised, self.decision = self.decision, None
        self._open_forwards, self._retained = 0, False
        if not synchronised:
            self.local |= arrived
            return (), ()
        local, self.local = self.local, set()
        missing = {key: name for key, name in self.names.items() if key not in arrived}
        return tuple(missing.values()), tuple(name for key, name in missing.items() if key in local)


def accumulates(parameters: Any) -> bool:
    """Return whether gradients that are not zero are there already, by the smallest few."""
    gradients = sorted((p.grad for p in parameters if _is_plain(p.grad)), key=lambda gradient: gradient.numel())
    return any(not is_zero(gradient) for gradient in gradients[:DEEP_ENOUGH])


def is_zero(gradient: Any) -> bool:
    """Return whether a gradient is there and zero everywhere."""
    return _is_plain(gradient) and not bool(gradient.detach().any())


def _is_plain(gradient: Any) -> bool:
    """Return whether a gradient can be looked at without communication: dense, and whole on this rank."""
    return type(gradient).__name__ == "Tensor" and not gradient.is_sparse
