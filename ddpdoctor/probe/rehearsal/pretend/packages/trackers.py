"""Experiment trackers that are not installed: modules that take everything and do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

TRACKERS = frozenset(
    {
        "wandb",
        "mlflow",
        "neptune",
        "comet_ml",
        "clearml",
        "aim",
        "swanlab",
        "trackio",
        "visdom",
        "tensorboard",
        "tensorboardX",
        "tensorboard_logger",
    }
)
"""Top-level modules; what torch.utils.tensorboard lacks is one of them, too."""


class Silent:
    """An object that takes every call, attribute, item and context, and does nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **options: Any) -> Any:  # noqa: D102 - it has nothing to say
        # As a decorator it gives back the function that it gets.
        alone = len(arguments) == 1 and not options and callable(arguments[0]) and not isinstance(arguments[0], type)
        return arguments[0] if alone and not isinstance(arguments[0], Silent) else Silent()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Silent()

    def __getitem__(self, key: object) -> Any:
        return Silent()

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return "silent"

    def __fspath__(self) -> str:
        return "silent"


class SilentModule(ModuleType):
    """A tracker without effect; names in capitals are classes, which can be inherited from."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (Silent,), {}) if name[:1].isupper() else Silent()
        setattr(self, name, made)
        return made
