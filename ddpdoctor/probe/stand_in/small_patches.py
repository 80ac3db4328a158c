"""Small patches: compiling, fused optimizers, precision and profiling."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from .devices import CUDA


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
    construct = optimizer.__init__

    @functools.wraps(construct)
    def __init__(self: Any, params: Any, defaults: Any) -> None:
        if isinstance(defaults, dict) and defaults.get("capturable"):
            defaults = {**defaults, "capturable": False}
        construct(self, params, defaults)

    optimizer.__init__ = __init__


def install_precision(torch: Any) -> None:
    """Translate the device of ``autocast``, of its decorators and of its queries."""
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
    construct = profile.__init__

    @functools.wraps(construct)
    def __init__(self: Any, *, activities: Any = None, **options: Any) -> None:
        options.pop("use_cuda", None)
        construct(self, activities=[cpu], **options)

    profile.__init__ = __init__
    older = torch.autograd.profiler.profile
    construct_older = older.__init__

    @functools.wraps(construct_older)
    def __init_older__(self: Any, *arguments: Any, **options: Any) -> None:
        options.pop("use_cuda", None)
        if options.get("use_device") == "cuda":
            options["use_device"] = None
        construct_older(self, *arguments, **options)

    older.__init__ = __init_older__
