"""The stand-in, put in place once torch is imported and before the user's next line."""

from __future__ import annotations

import functools
import importlib
import re
import sys
import threading
from collections.abc import Callable
from types import FunctionType, TracebackType
from typing import Any, Optional

from ..journal import Journal
from . import cuda_module, process_groups, sync_batch_norm, typed_tensors
from .devices import NO_SUCH_GPU, Devices
from .gaps import StandInGap
from .small_patches import install_compiling, install_optimizers, install_precision, install_profiling

# The function mode where torch switches it off: in threads, inside `backward()`, under default devices.


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


# `cuda` as `cpu` in every call of a torch function: moves, factories, pinning.

Handler = Callable[..., Any]


def make_mode(torch: Any, devices: Devices, note_truth: Callable[[], object]) -> Any:
    """Return the mode; ``note_truth`` is called when the user's code may have read where a tensor is.

    A class inside a function, because its base exists only once torch is imported.
    """
    handlers = _handlers(torch, devices, note_truth)
    on_cpu, tensor = devices.on_cpu, torch.Tensor
    methods = {name: getattr(tensor, name) for name in ("cuda", "to", "pin_memory", "type")}

    class CudaOnCpu(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        """A mode that calls the function with the CPU where it was to be called with a CUDA device."""

        def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            handler = handlers.get(function)
            if handler is not None:
                return handler(function, arguments, options or {})
            if type(function) is FunctionType:
                # torch names the method by its attribute, which the user's code may have replaced.
                for name, method in methods.items():
                    if getattr(tensor, name) is function:
                        return handlers[method](method, arguments, options or {})
            if options:
                device = options.get("device")
                if device is not None:
                    options["device"] = on_cpu(device)
                if options.get("pin_memory"):
                    options["pin_memory"] = False
                return function(*arguments, **options)
            return function(*arguments)

    return CudaOnCpu()


def _handlers(torch: Any, devices: Devices, note_truth: Callable[[], object]) -> dict[Any, Handler]:
    """Return the handlers of functions without a device as a keyword, or that are for CUDA alone."""
    tensor, named = torch.Tensor, torch.device
    handlers: dict[Any, Handler] = {}

    def cuda(function: Any, arguments: Any, options: Any) -> Any:
        device = arguments[1] if len(arguments) > 1 else options.get("device")
        devices.use(device)
        memory_format = options.get("memory_format")
        moved = arguments[0]
        return moved if memory_format is None else moved.contiguous(memory_format=memory_format)

    def to(function: Any, arguments: Any, options: Any) -> Any:
        if "device" in options:
            options = {**options, "device": devices.on_cpu(options["device"])}
        elif len(arguments) > 1:
            arguments = (arguments[0], devices.on_cpu(arguments[1]), *arguments[2:])
        return function(*arguments, **options)

    def by_index(function: Any, arguments: Any, options: Any) -> Any:
        """Name the accelerator that a bare index means, which the CPU's torch does not have."""
        if arguments and _is_index(arguments[0]):
            arguments = (named("cuda", arguments[0]), *arguments[1:])
        elif _is_index(options.get("device")):
            options = {**options, "device": named("cuda", options["device"])}
        return function(*arguments, **options)

    def itself(function: Any, arguments: Any, options: Any) -> Any:
        return arguments[0]

    def typed(function: Any, arguments: Any, options: Any) -> Any:
        wanted = arguments[1] if len(arguments) > 1 else options.get("dtype")
        if isinstance(wanted, str) and wanted.startswith("torch.cuda."):
            devices.use(None)
            arguments = (arguments[0], wanted.replace("torch.cuda.", "torch."), *arguments[2:])
            options = {name: value for name, value in options.items() if name != "dtype"}
        return function(*arguments, **options)

    def truth(function: Any, arguments: Any, options: Any) -> Any:
        note_truth()
        return function(*arguments, **options)

    handlers[tensor.cuda] = cuda
    handlers[tensor.to] = to
    handlers[torch.device] = by_index
    handlers[torch._C._nn._parse_to] = by_index
    handlers[tensor.pin_memory] = itself
    handlers[tensor.type] = typed
    handlers[tensor.is_cuda.__get__] = truth
    handlers[tensor.device.__get__] = truth
    handlers[tensor.get_device] = truth
    return handlers


def _is_index(device: Any) -> bool:
    return isinstance(device, int) and not isinstance(device, bool)


_NEEDS_A_GPU = re.compile(
    r"not (been )?compiled with cu|support for cuda|ATen_cuda|gloo does not|with gloo|"
    r"_cuda_|libcuda|CUDA driver|CUDA_HOME|from the 'CPU' backend|no kernel|triton|"
    r"(requires?|needs?|only (supports?|works?)|must be|expected).{0,60}\b(CUDA|GPU)|"
    r"not implemented for '(Half|BFloat16|Float8\w*)'|(PREMUL_SUM|NCCL)",
    re.IGNORECASE,
)
"""What torch and CUDA extensions report on a CPU that would have gone well on a GPU."""


class StandIn:
    """CUDA, with so many GPUs on this node, served from the CPU from now on and in every thread."""

    def __init__(self, journal: Journal, torch: Any, device_count: int) -> None:
        self._journal = journal
        self._location_reads: set[tuple[str, int]] = set()
        """Lines that read where a tensor is."""
        devices = self._devices = Devices(
            torch, device_count, self._note_use, known=int(journal.plan.get("nodes", 1)) > 1
        )
        cuda_module.install(torch, devices)
        process_groups.install(torch, devices)
        sync_batch_norm.install(torch)
        install_precision(torch)
        install_compiling(torch)
        install_optimizers(torch)
        install_profiling(torch)
        typed_tensors.install(torch, devices)
        keep_on(torch, make_mode(torch, devices, self._note_location_read), devices)

    def caused(self, error: BaseException) -> str:
        """Return ``stand-in`` when an exception comes of what the CPU is not; empty when it is the script's own.

        A GPU that the node lacks is the script's own fault. What follows from a line that read where a tensor is may be
        ours: on a GPU the value would have been another.
        """
        if not isinstance(error, Exception) or NO_SUCH_GPU in str(error):
            return ""
        seen: Optional[BaseException] = error
        while seen is not None:
            if isinstance(seen, StandInGap):
                return "stand-in"
            seen = seen.__cause__ or seen.__context__
        if _line_of(error.__traceback__) in self._location_reads:
            return "stand-in"
        ours = not isinstance(error, (ImportError, KeyError, OSError))
        return "stand-in" if ours and _NEEDS_A_GPU.search(str(error)) else ""

    def _note_use(self, index: int, how: str) -> None:
        devices, journal = self._devices, self._journal
        journal.event(
            "device_use",
            index=index,
            how=how,
            was_set=devices.was_set,
            forked=journal.forked_from is not None and devices.used_by_parent,
            site=journal.here(),
        )

    def _note_location_read(self) -> None:
        """Note the user's line behind the function mode."""
        frame = sys._getframe(3)
        line = (frame.f_code.co_filename, frame.f_lineno)
        if line not in self._location_reads:
            self._location_reads.add(line)


def _line_of(trace: Optional[TracebackType]) -> tuple[str, int]:
    line = ("", 0)
    while trace is not None:
        line = (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return line
