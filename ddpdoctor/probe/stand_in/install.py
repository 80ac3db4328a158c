"""The stand-in, put in place once torch is imported and before the user's next line."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
import threading
from collections.abc import Callable
from traceback import walk_tb
from types import FunctionType
from typing import Any, Optional

from ..journal import Journal
from ..torch_compat import replaces
from . import cuda_module, process_groups
from .cuda_module import CUDA, NO_SUCH_GPU, Devices, StandInGap

# Small patches: compiling, fused optimizers, precision and profiling.


def install_compiling(torch: Any) -> None:
    """Let ``torch.compile`` and ``Module.compile`` run what they are given as it is."""
    module_class = torch.nn.Module

    class OptimizedModule(module_class):  # type: ignore[misc, valid-type]
        """A module that holds the model as ``_orig_mod``, as ``torch.compile`` does, and has its attributes."""

        def __init__(self, module: Any) -> None:
            super().__init__()
            self._orig_mod = module
            self.training = module.training

        def forward(self, *arguments: Any, **options: Any) -> Any:
            return self._orig_mod(*arguments, **options)

        def __getattr__(self, name: str) -> Any:
            if name == "_orig_mod":
                return self._modules["_orig_mod"]
            return getattr(self._orig_mod, name)

    def run_eagerly(model: Any = None, **options: Any) -> Any:
        if model is None:
            return run_eagerly
        return OptimizedModule(model) if isinstance(model, module_class) else model

    torch.compile = run_eagerly
    OptimizedModule.__qualname__ = OptimizedModule.__name__
    module_class.compile = lambda self, *arguments, **options: None


def install_optimizers(torch: Any) -> None:
    """Ignore ``capturable``, which is for CUDA graphs and refuses CPU parameters; ``fused`` and ``foreach`` work."""
    optimizer = torch.optim.Optimizer

    @replaces("__init__", optimizer)
    def __init__(construct: Any, self: Any, params: Any, defaults: Any) -> None:
        if isinstance(defaults, dict) and defaults.get("capturable"):
            defaults = {**defaults, "capturable": False}
        construct(self, params, defaults)


def install_precision(torch: Any) -> None:
    """Translate the device of ``autocast``, of its decorators and of its queries."""
    signature = inspect.signature(torch.autocast.__init__)

    @replaces("__init__", torch.autocast)
    def __init__(construct: Any, self: Any, *arguments: Any, **options: Any) -> None:
        given = signature.bind(self, *arguments, **options).arguments
        if given.get("device_type") == CUDA:
            given["device_type"] = "cpu"
            if given.get("dtype") in (None, torch.float16):
                given["dtype"] = torch.bfloat16
        given.pop("self")
        construct(self, **given)

    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        if hasattr(torch, name):
            setattr(torch, name, _for_cpu(getattr(torch, name)))
    if hasattr(torch, "get_autocast_gpu_dtype"):
        torch.get_autocast_gpu_dtype = lambda: torch.get_autocast_dtype("cpu")
    _custom_functions(torch)


def _for_cpu(function: Any) -> Any:
    """Return the same query for the CPU; without a device it means CUDA."""

    def asked(*arguments: Any) -> Any:
        if not arguments or isinstance(arguments[0], bool):
            return function("cpu", *arguments)
        return function("cpu" if arguments[0] == CUDA else arguments[0], *arguments[1:])

    return asked


def _custom_functions(torch: Any) -> None:
    """Make ``custom_fwd`` and ``custom_bwd`` of ``torch.amp``, which take the device as a keyword, run on the CPU."""
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


def install_profiling(torch: Any) -> None:
    """Take the CUDA activity out of the arguments of ``torch.profiler``."""
    cpu = torch.profiler.ProfilerActivity.CPU
    profile = torch.profiler.profile

    @replaces("__init__", profile)
    def __init__(construct: Any, self: Any, *, activities: Any = None, **options: Any) -> None:
        options.pop("use_cuda", None)
        construct(self, activities=[cpu], **options)

    older = torch.autograd.profiler.profile

    @replaces("__init__", older)
    def __init_older__(construct_older: Any, self: Any, *arguments: Any, **options: Any) -> None:
        options.pop("use_cuda", None)
        if options.get("use_device") == "cuda":
            options["use_device"] = None
        construct_older(self, *arguments, **options)


# What no function mode sees: tensor types of CUDA, generators, checkpoints that remember a GPU.

TYPES = (
    "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "LongTensor", "IntTensor", "ShortTensor",
    "ByteTensor", "CharTensor", "BoolTensor",
)  # fmt: skip
BEFORE_TORCH = 5
"""Priority among what restores storages; torch's own begin at 10."""


def install(torch: Any, devices: Devices) -> None:
    """Replace types and generators, and restore storages of CUDA on the CPU."""
    for name in TYPES:
        if hasattr(torch, name):
            setattr(torch.cuda, name, getattr(torch, name))
    set_type = torch.set_default_tensor_type

    def set_default_tensor_type(kind: Any) -> None:
        set_type(kind.replace("torch.cuda.", "torch.") if isinstance(kind, str) else kind)

    torch.set_default_tensor_type = set_default_tensor_type
    # A stream of ours is refused before any mode is entered.
    torch.Tensor.record_stream = lambda self, stream: None
    _generators(torch, devices)
    _storages(torch, devices)


def _generators(torch: Any, devices: Devices) -> None:
    """Make ``torch.Generator(device="cuda")`` on the CPU; every generator is still one to ``isinstance``."""
    real = torch.Generator

    class Kind(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real)

        def __subclasscheck__(cls, subclass: Any) -> bool:
            return issubclass(subclass, real)

    class Generator(metaclass=Kind):
        """A class that makes generators of torch."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return real(devices.on_cpu(device))

    # A generator is pickled with the class that has this name.
    Generator.__module__, Generator.__qualname__ = torch.__name__, "Generator"
    torch.Generator = Generator


def _storages(torch: Any, devices: Devices) -> None:
    """Restore a storage saved on ``cuda:1``, which needs that GPU when it is loaded without ``map_location``."""

    def restored(storage: Any, location: str) -> Any:
        if not (location == CUDA or location.startswith("cuda:")):
            return None
        index = devices.index(location)
        if not 0 <= index < devices.count():
            raise RuntimeError(
                f"Attempting to deserialize object on CUDA device {index} but torch.cuda.device_count() is "
                f"{devices.count()}. Please use torch.load with map_location to map your storages to an existing "
                "device."
            )
        return storage

    def moved(storage: Any, device: Any = None, non_blocking: bool = False) -> Any:
        devices.use(device)
        return storage

    torch.UntypedStorage.cuda = moved
    torch.storage.TypedStorage.cuda = moved
    torch.serialization.register_package(BEFORE_TORCH, lambda storage: None, restored)


# The function mode where torch switches it off: in threads, inside `backward()`, under default devices.


def keep_on(torch: Any, mode: Any, devices: Devices) -> None:
    """Enter the mode for good in this thread, and wherever the user's code may run later."""
    mode.__enter__()
    _in_backward(torch, mode)
    _in_threads(mode)
    _under_default_device(torch, devices)


def _in_backward(torch: Any, mode: Any) -> None:
    """Enter the mode in the engine, where hooks and recomputation run and ``Tensor.backward`` has no modes."""

    @replaces("_engine_run_backward", torch.autograd.graph, torch.autograd)
    def run_with_mode(run: Any, *arguments: Any, **options: Any) -> Any:
        if torch._C._len_torch_function_stack():
            return run(*arguments, **options)
        with mode:
            return run(*arguments, **options)


def _in_threads(mode: Any) -> None:
    """Enter the mode in what a thread runs, for the stack of modes is a thread's own."""

    @replaces("run", threading.Thread)
    def run_with_mode(run: Any, thread: threading.Thread) -> None:
        with mode:
            run(thread)


def _under_default_device(torch: Any, devices: Devices) -> None:
    """Serve ``with torch.device("cuda")`` and ``set_default_device``, which put the device in after our mode."""
    context = importlib.import_module("torch.utils._device").DeviceContext

    @replaces("__init__", context)
    def __init__(construct: Any, self: Any, device: Any) -> None:
        construct(self, devices.on_cpu(device))


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
    r"_cuda_|_for_cpu\b|libcuda|CUDA driver|CUDA_HOME|from the 'CPU' backend|no kernel|triton|"
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
        process_groups.install_sync_batch_norm(torch)
        install_precision(torch)
        install_compiling(torch)
        install_optimizers(torch)
        install_profiling(torch)
        install(torch, devices)
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
        raised = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
        if raised and raised[-1] in self._location_reads:
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
        self._location_reads.add((frame.f_code.co_filename, frame.f_lineno))
