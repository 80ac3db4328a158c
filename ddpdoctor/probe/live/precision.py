"""In which precision a GPU with tensor cores multiplies the weights of each model: counted once, in a training forward.

What is counted is what linear and convolution layers were called with, so autocast and a model in bfloat16 are seen
where they take effect. A layer that torch compiles is not called one by one and not counted.
"""

from __future__ import annotations

import os
from typing import Any, Callable

from ..journal import Journal

COUNTED_FORWARD = 3
"""By then lazy layers and warm-up are over."""
MOST_LAYERS = 20_000
FIRST_WITH_TF32 = 8
"""Major compute capability of the first GPUs that multiply float32 on their tensor cores."""


class Precision:
    """The weights that one forward of a model multiplies."""

    def __init__(self, journal: Journal, torch: Any, is_compiling: Callable[[], bool]) -> None:
        self._journal = journal
        self._torch = torch
        self._is_compiling = is_compiling
        layers = torch.nn.modules
        self._convolutions = layers.conv._ConvNd
        self._matrices = (layers.Linear, layers.Bilinear, self._convolutions)
        self._module: Any = None
        """What is counted now."""
        self._handles: list[Any] = []
        self._full: dict[int, int] = {}
        """Elements of the weights that were multiplied in float32, by layer …"""
        self._all: dict[int, int] = {}
        """… and of all that were multiplied."""

    def is_of_interest(self, ddp: Any) -> bool:
        """Return whether a model is on a GPU that could multiply float32 faster than it does by default."""
        torch = self._torch
        if ddp.device_type != "cuda" or getattr(torch.version, "hip", None) or os.environ.get("NVIDIA_TF32_OVERRIDE"):
            return False
        return bool(torch.cuda.get_device_capability()[0] >= FIRST_WITH_TF32)

    def begins(self, module: Any, device_type: str) -> None:
        """Begin to count the forward of a module."""
        if self._module is not None:
            return  # one DDP module inside of another
        self._module = module
        self._full.clear()
        self._all.clear()
        layers = [layer for layer in module.modules() if isinstance(layer, self._matrices)]
        if len(layers) > MOST_LAYERS:
            return
        for layer in layers:
            hook = self._counts(self._is_reduced(isinstance(layer, self._convolutions)), device_type)
            self._handles.append(layer.register_forward_pre_hook(hook))

    def ended(self, module: Any, wrap: int) -> None:
        """End the count, however the forward of the module ended."""
        if self._module is not module:
            return
        self._module = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._all:
            self._journal.event(
                "matmul_precision", wrap=wrap, weights=sum(self._all.values()), full_weights=sum(self._full.values())
            )

    def _counts(self, is_reduced: bool, device_type: str) -> Callable[[Any, Any], None]:
        """Return a hook that notes a layer's weights; ``is_reduced`` is whether float32 is multiplied as TF32."""
        torch, is_compiling, journal = self._torch, self._is_compiling, self._journal

        def _note_weights(layer: Any) -> None:
            weight = layer.weight
            self._all[id(layer)] = int(weight.numel())
            if weight.dtype == torch.float32 and not is_reduced and not _is_autocast(torch, device_type):
                self._full[id(layer)] = int(weight.numel())

        def hook(layer: Any, _: Any) -> None:
            if not is_compiling():
                journal.guarded(_note_weights, layer, harms=("matmul_precisions",))

        return hook

    def _is_reduced(self, convolution: bool) -> bool:
        """Return whether a GPU takes less than float32 for float32; convolutions have a setting of their own."""
        backends = self._torch.backends
        newer: Any = getattr(backends.cudnn, "conv", None) if convolution else backends.cuda.matmul
        try:
            return newer.fp32_precision not in ("ieee", "none")
        except (AttributeError, AssertionError):  # torch before 2.9
            if convolution:
                return bool(backends.cudnn.allow_tf32)
            return bool(self._torch.get_float32_matmul_precision() != "highest")


def _is_autocast(torch: Any, device_type: str) -> bool:
    if device_type == "cuda":
        return bool(torch.is_autocast_enabled())
    return bool(torch.is_autocast_enabled(device_type))
