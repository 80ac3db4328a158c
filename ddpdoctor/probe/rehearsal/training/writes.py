"""Which lines change, in place, what a module holds beside the parameters that are trained."""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable

from ...journal import Journal
from ...user_code import leave_no_frame

WATCHED_FORWARD = 1
"""The number of the training forward that is watched: in the first a module may fill what it holds."""
MOST_WRITES = 32


def watch_writes(
    journal: Journal,
    torch: Any,
    ddp_class: Any,
    ordinal_of: Callable[[Any], tuple[int, int]],
    written: set[tuple[int, str]],
) -> None:
    """Watch one training forward of each wrap whose module holds what DDP neither averages nor hands on.

    The wrap and the name of what is changed are put into ``written``.
    ``ordinal_of`` returns the number of a wrap and that of its next training forward, which is negative for others.
    """
    from torch.overrides import TorchFunctionMode

    class Writes(TorchFunctionMode):  # type: ignore[misc]
        """What is called on tensors while it is entered."""

        def __init__(self, wrap: int, held: dict[int, str]) -> None:
            super().__init__()
            self._wrap = wrap
            self._held = held
            self._left = MOST_WRITES

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if self._left and args and _is_write(getattr(function, "__name__", "")):
                journal.guarded(self._note, args[0], sys._getframe(1), harms=())
            return function(*args, **(kwargs or {}))

        def _note(self, tensor: Any, frame: Any) -> None:
            name = self._held.get(_address(tensor)) if isinstance(tensor, torch.Tensor) else None
            if name is not None:
                self._left -= 1
                written.add((self._wrap, name))
                journal.event("own_write", wrap=self._wrap, name=name, site=journal.site(frame))

    def watch(ddp: Any) -> Any:
        wrap, ordinal = ordinal_of(ddp)
        compiler = sys.modules.get("torch._dynamo.utils")
        # What was compiled in the first forward would be compiled anew for the mode.
        if ordinal != WATCHED_FORWARD or (compiler is not None and compiler.counters["frames"]):
            return None
        held = {_address(p): name for name, p in ddp.module.named_parameters() if not p.requires_grad}
        if not ddp.will_sync_module_buffers():
            held.update((_address(buffer), name) for name, buffer in ddp.module.named_buffers())
        return Writes(wrap, held) if held else None

    forward = ddp_class.forward

    @functools.wraps(forward)
    def watched(ddp: Any, *inputs: Any, **options: Any) -> Any:
        writes = journal.guarded(watch, ddp, harms=())
        try:
            if writes is None:
                return forward(ddp, *inputs, **options)
            with writes:
                return forward(ddp, *inputs, **options)
        except BaseException as error:
            leave_no_frame(error)
            raise

    ddp_class.forward = watched


def _is_write(name: str) -> bool:
    return (
        name in ("__setitem__", "__set__")
        or (name.startswith("__i") and name.endswith("__"))
        or name[-1:] == "_" != name[-2:-1]
    )


def _address(tensor: Any) -> int:
    """Return where the memory of a tensor begins, which all views of it share."""
    return int(tensor.untyped_storage().data_ptr())
