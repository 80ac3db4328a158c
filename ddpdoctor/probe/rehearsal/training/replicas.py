"""Digests of gradients and parameters around the first optimizer steps, so that the ranks' replicas can be compared."""

from __future__ import annotations

from typing import Any, Optional

from ...journal import Journal
from ...observed import tensor_digest
from .ddp_modules import Modules

STEPS_DIGESTED = 6
"""Steps of an optimizer around which is looked."""
LOOKS = 32
"""Looks of a process in all."""
MOST_TENSORS = 512
"""With more parameters a part of them is looked at, the same on every rank."""
MOST_BYTES = 1 << 25
"""Bytes of gradients, and as many of parameters, that are digested around a step; large tensors are sampled."""

Named = list[tuple[int, str, Any]]
"""Wrap (-1 for a parameter of no wrapped module), name, parameter."""


class Replicas:
    """Digests of what an optimizer holds, before and after it steps."""

    def __init__(self, journal: Journal, modules: Modules) -> None:
        self._journal = journal
        self._modules = modules
        self._looks = 0
        self._versions: dict[int, int] = {}
        """How often parameters that want no gradient had been changed at the first look, by their identity."""

    def before_step(self, optimizer: Any, number: int, ordinal: int) -> None:
        """Digest the gradients that the step will use, and the parameters before the first of them."""
        if ordinal >= STEPS_DIGESTED or self._looks >= LOOKS:
            return
        self._looks += 1
        named = self._parameters(optimizer)
        with_gradient = [(wrap, name, p.grad) for wrap, name, p in named if p.grad is not None]
        self._write("gradient_digests", number, ordinal + 1, with_gradient)
        if ordinal == 0:
            self._write("parameter_digests", number, 0, named)

    def after_step(self, optimizer: Any, number: int, ordinal: int) -> None:
        """Digest the parameters that the step has made."""
        if ordinal < STEPS_DIGESTED and self._looks <= LOOKS:
            self._write("parameter_digests", number, ordinal + 1, self._parameters(optimizer))

    def scope_of(self, optimizer: Any) -> tuple[list[int], int]:
        """Return the wraps of the parameters that an optimizer steps, -1 for no wrapped module, and their elements."""
        wraps, elements = set(), 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owner = self._owner(parameter)
                wraps.add(-1 if owner is None else owner[0])
                elements += parameter.numel()
        return sorted(wraps), elements

    def _owner(self, parameter: Any) -> Optional[tuple[int, str]]:
        return self._modules.name_of(parameter)

    def _parameters(self, optimizer: Any) -> Named:
        named: Named = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                shape = "x".join(map(str, parameter.shape)) or "scalar"
                owner = self._owner(parameter) or (-1, f"parameter {len(named)} ({shape})")
                named.append((*owner, parameter))
        named += self._changed(named)
        stride = -(-len(named) // MOST_TENSORS)
        return named[:: max(1, stride)]

    def _changed(self, named: Named) -> Named:
        """Return what the same modules hold beside, want no gradient for, and change in place while they train."""
        held, wraps = {id(parameter) for _, _, parameter in named}, {wrap for wrap, _, _ in named}
        return [
            entry
            for entry in self._modules.parameters()
            if entry[0] in wraps
            and not entry[2].requires_grad
            and id(entry[2]) not in held
            # ``_version`` counts changes in place; inference tensors have none.
            and not entry[2].is_inference()
            and self._versions.setdefault(id(entry[2]), entry[2]._version) != entry[2]._version
        ]

    def _write(self, event: str, number: int, step: int, tensors: Named) -> None:
        total = sum(tensor.numel() * tensor.element_size() for _, _, tensor in tensors)
        share = None if total <= MOST_BYTES else max(64, MOST_BYTES // len(tensors))
        by_wrap: dict[int, dict[str, str]] = {}
        for wrap, name, tensor in tensors:
            digest = tensor_digest(tensor, share)
            if digest:
                by_wrap.setdefault(wrap, {})[name] = digest
        for wrap, digests in by_wrap.items():
            self._journal.event(event, optimizer=number, step=step, wrap=wrap, digests=digests)
