"""``cuda`` as ``cpu`` in every call of a torch function: moves, factories, pinning."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from .devices import Devices

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
