"""Mixed precision: autocast for CUDA becomes bfloat16 autocast on the CPU; a GradScaler works as it is."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from .devices import CUDA


def install(torch: Any) -> None:
    """Translate the device of ``autocast``, of its decorators and of the questions about it."""
    autocast = torch.autocast
    construct = autocast.__init__
    signature = inspect.signature(construct)

    @functools.wraps(construct)
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        given = signature.bind(self, *arguments, **options).arguments
        if given.get("device_type") == CUDA:
            given["device_type"] = "cpu"
            if given.get("dtype") in (None, torch.float16):
                given["dtype"] = torch.bfloat16
        given.pop("self")
        construct(self, **given)

    autocast.__init__ = __init__
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        if hasattr(torch, name):
            setattr(torch, name, _for_cpu(getattr(torch, name)))
    if hasattr(torch, "get_autocast_gpu_dtype"):
        torch.get_autocast_gpu_dtype = lambda: torch.get_autocast_dtype("cpu")
    _custom_functions(torch)


def _for_cpu(function: Any) -> Any:
    """The same question, asked of the CPU; without a device it means CUDA."""

    def asked(*arguments: Any) -> Any:
        if not arguments or isinstance(arguments[0], bool):
            return function("cpu", *arguments)
        return function("cpu" if arguments[0] == CUDA else arguments[0], *arguments[1:])

    return asked


def _custom_functions(torch: Any) -> None:
    """``custom_fwd`` and ``custom_bwd`` of ``torch.amp`` take the device as a keyword."""
    for name in ("custom_fwd", "custom_bwd"):
        decorator = getattr(torch.amp, name, None)
        if decorator is None:
            continue

        def on_cpu(*arguments: Any, decorator: Any = decorator, **options: Any) -> Any:
            if options.get("device_type") == CUDA:
                options["device_type"] = "cpu"
            if options.get("cast_inputs") is torch.float16:
                options["cast_inputs"] = torch.bfloat16
            return decorator(*arguments, **options)

        setattr(torch.amp, name, on_cpu)
        cuda_amp = torch.cuda.amp
        if hasattr(cuda_amp, name):
            setattr(cuda_amp, name, functools.partial(on_cpu, device_type="cpu"))
