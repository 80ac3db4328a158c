"""The function mode where torch switches it off: in threads, inside ``backward()``, under default devices."""

from __future__ import annotations

import functools
import importlib
import threading
from typing import Any

from .devices import Devices


def keep_on(torch: Any, mode: Any, devices: Devices) -> None:
    """Enter the mode for good in this thread, and wherever the user's code may run later."""
    mode.__enter__()
    _in_backward(torch, mode)
    _in_threads(mode)
    _under_default_device(torch, devices)


def _in_backward(torch: Any, mode: Any) -> None:
    """Enter the mode in the engine, where hooks and recomputation run and ``Tensor.backward`` has no modes."""
    run = torch.autograd.graph._engine_run_backward

    @functools.wraps(run)
    def run_with_mode(*arguments: Any, **options: Any) -> Any:
        if torch._C._len_torch_function_stack():
            return run(*arguments, **options)
        with mode:
            return run(*arguments, **options)

    torch.autograd.graph._engine_run_backward = run_with_mode
    torch.autograd._engine_run_backward = run_with_mode


def _in_threads(mode: Any) -> None:
    """Enter the mode in what a thread runs, for the stack of modes is a thread's own."""
    run = threading.Thread.run

    @functools.wraps(run)
    def run_with_mode(thread: threading.Thread) -> None:
        with mode:
            run(thread)

    threading.Thread.run = run_with_mode  # type: ignore[assignment,method-assign]


def _under_default_device(torch: Any, devices: Devices) -> None:
    """Serve ``with torch.device("cuda")`` and ``set_default_device``, which put the device in after our mode."""
    context = importlib.import_module("torch.utils._device").DeviceContext
    construct = context.__init__

    @functools.wraps(construct)
    def __init__(self: Any, device: Any) -> None:
        construct(self, devices.on_cpu(device))

    context.__init__ = __init__
