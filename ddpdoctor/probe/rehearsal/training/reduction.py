"""What DDP does with the gradients of one wrap, from its forward to the optimizer's step."""

from __future__ import annotations

from typing import Any, Optional

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
        self.training_forwards = 0
        self.last_missing: Optional[tuple[str, ...]] = None
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

    def close(self) -> tuple[str, ...]:
        """End the iteration: forget its gradients, and return the parameters that got none in a reduction."""
        arrived, self.arrived = self.arrived, set()
        if not arrived:
            return ()
        synchronised, self.decision = self.decision, None
        self._open_forwards, self._retained = 0, False
        if not synchronised:
            return ()
        return tuple(name for key, name in self.names.items() if key not in arrived)


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
