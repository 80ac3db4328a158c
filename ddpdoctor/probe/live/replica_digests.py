"""Digests of the parameters of DDP modules now and then, so that replicas that drift apart are seen.

A digest is the sum of a parameter's bits as whole numbers: the same in any order, another one for every flipped bit,
and one reading of the memory that each step reads several times.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

from ..journal import Journal
from .reductions import Reducer

EVERY = 100
"""Steps at first; then a quarter of those made, alike on every rank: one look costs 0.5 ms of a small model …"""
MOST_BETWEEN = 500
"""… and at the most so many."""
PARAMETERS = 128
"""With more of them it is done less often, alike on every rank: on a GPU each costs a launch or two."""
READ_AFTER = 10
"""Steps after which a GPU has surely made what was asked of it."""
MOST_LOOKS = 2_000


class ReplicaDigests:
    """The DDP modules of a rank."""

    def __init__(
        self,
        journal: Journal,
        torch: Any,
        wrap_number: Callable[[Any], Optional[int]],
        reducers: Callable[[], list[tuple[Any, Reducer]]],
    ) -> None:
        self._journal = journal
        self._torch = torch
        self._wrap_number = wrap_number
        self._reducers = reducers
        self._steps = 0
        self._next = EVERY
        self._looks = 0
        self._seen: dict[int, tuple[int, int]] = {}
        """By wrap the forwards that had synchronised, and those that had not, at the newest step."""
        self._local: set[int] = set()
        """Wraps that were stepped without a reduction: they may differ for a while."""
        self._made: list[tuple[dict[str, Any], list[str], Any]] = []
        self._read_at = 0

    def stepped(self) -> None:
        """Count a step of an optimizer, and digest where it is time to."""
        self._steps += 1
        if self._made and self._steps >= self._read_at:
            self.write()
        if self._steps >= self._next - 1:
            self._journal.guarded(self._look, harms=("replica_digests",))

    def write(self) -> None:
        """Write what was digested and is not written yet."""
        made, self._made = self._made, []
        for row, names, sums in made:
            digests = {name: f"{number & (1 << 64) - 1:x}" for name, number in zip(names, sums.tolist())}
            self._journal.event("replica_digest", **row, digests=digests)

    def _look(self) -> None:
        """Digest at the step that is due; the step before shows whether it is made without a reduction."""
        due, parameters = self._steps >= self._next, 0
        for ddp, reducer in self._reducers():
            wrap = self._wrap_number(ddp)
            if wrap is None:
                continue
            synchronised, kept_local = self._seen.get(wrap, (reducer.iterations, reducer.kept_local))
            if kept_local != reducer.kept_local and synchronised == reducer.iterations:
                self._local.add(wrap)
            self._seen[wrap] = reducer.iterations, reducer.kept_local
            if due and wrap not in self._local and not getattr(ddp, "_comm_hooks", ()):
                parameters += self._digest(ddp, wrap, reducer.iterations)
        if due:
            self._looks += 1
            between = min(MOST_BETWEEN, max(EVERY, self._steps // 4))
            self._next = self._steps + between * max(1, -(-parameters // PARAMETERS))
            if self._looks >= MOST_LOOKS:
                self._next = 1 << 62

    def _digest(self, ddp: Any, wrap: int, iterations: int) -> int:
        torch = self._torch
        ignored = set(getattr(ddp, "parameters_to_ignore", ()))
        sums, names = [], []
        kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        for name, parameter in ddp.module.named_parameters():
            own = parameter.detach()
            kind = kinds.get(own.element_size())
            if name in ignored or not parameter.requires_grad or type(own).__name__ not in ("Tensor", "Parameter"):
                continue
            if kind is not None and not own.is_sparse and not own.is_complex():
                names.append(name)
                sums.append(own.view(kind).sum())
        if sums:
            together = torch.stack(sums)
            if together.is_cuda:
                together = together.to("cpu", non_blocking=True)
            row = {"wrap": wrap, "step": self._steps, "iterations": iterations}
            self._made.append((row, names, together))
            self._read_at = self._steps + (READ_AFTER if parameter.is_cuda else 1)
        return len(sums)
