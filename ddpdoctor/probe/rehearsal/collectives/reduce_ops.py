"""The reduce operation of a collective that is about to start, as a number that indexes ``REDUCE_OPS``."""

from __future__ import annotations

import os
from types import FrameType
from typing import Any, Optional

REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")

_AUTOGRAD = os.path.join("torch", "autograd", "")


class ReduceOps:
    """The reduce operation, from the operator's argument, or from the call where this torch keeps the argument closed.

    The boxed argument has a field to read in torch 2.10, none in 2.8. Functions of torch.distributed hand it over in
    options that they have just made, a local variable of theirs; DDP's reducer, which is C++, always sums.
    """

    def __init__(self, torch: Any) -> None:
        names = ("AllreduceOptions", "AllreduceCoalescedOptions", "ReduceOptions", "ReduceScatterOptions")
        c10d = torch._C._distributed_c10d
        self._options = tuple(getattr(c10d, name) for name in names if hasattr(c10d, name))

    def number_of(self, boxed: Any, caller: Optional[FrameType]) -> Optional[int]:
        """Return it; None where neither the argument nor ``caller``, the innermost frame, shows it."""
        if boxed._has_method("op"):
            return int(boxed.op())
        if caller is None or _AUTOGRAD in caller.f_code.co_filename:
            return REDUCE_OPS.index("sum")
        given = [value for value in caller.f_locals.values() if isinstance(value, self._options)]
        return int(given[0].reduceOp.op) if len(given) == 1 else None
