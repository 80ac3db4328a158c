"""``torch.compile`` without a compiler: the model runs eagerly, in the wrapper that users reach through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def install(torch: Any, note: Callable[[], object]) -> None:
    """Replace ``torch.compile`` and ``Module.compile``; ``note`` is called at each use."""
    module_class = torch.nn.Module

    class OptimizedModule(module_class):  # type: ignore[misc, valid-type]
        """Holds the model as ``_orig_mod``, where ``torch.compile`` holds it too, and answers for its attributes."""

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
        note()
        if model is None:
            return run_eagerly
        return OptimizedModule(model) if isinstance(model, module_class) else model

    torch.compile = run_eagerly
    OptimizedModule.__qualname__ = OptimizedModule.__name__
    module_class.compile = lambda self, *arguments, **options: note() and None
