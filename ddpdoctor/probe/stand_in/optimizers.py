"""Optimizers that were to run inside CUDA graphs."""

from __future__ import annotations

import functools
from typing import Any


def install(torch: Any) -> None:
    """``capturable`` is for CUDA graphs and refuses CPU parameters; ``fused`` and ``foreach`` work as they are."""
    optimizer = torch.optim.Optimizer
    construct = optimizer.__init__

    @functools.wraps(construct)
    def __init__(self: Any, params: Any, defaults: Any) -> None:
        if isinstance(defaults, dict) and defaults.get("capturable"):
            defaults = {**defaults, "capturable": False}
        construct(self, params, defaults)

    optimizer.__init__ = __init__
