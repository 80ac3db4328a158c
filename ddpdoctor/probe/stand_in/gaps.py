"""What the stand-in cannot serve: an error with its name, at the user's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


class StandInGap(RuntimeError):
    """The script needs something that only a real GPU has."""


def standing_for(name: str, real: Any) -> Any:
    """Return what stands in the place of ``real``, by its ``name`` as the user would spell it, until it is used.

    A function for a function, and a class for a class: a subclass of the real one, so that annotations
    (``CUDAGraph | None``) and ``isinstance`` go on as before.
    """
    return _class(name, real) if isinstance(real, type) else _function(name)


def _class(name: str, real: type) -> type:
    class NotServed(real):  # type: ignore[misc]
        """A class that raises when an object is made of it."""

        def __new__(cls, *arguments: Any, **options: Any) -> Any:  # noqa: ARG004 - those of the real one
            _refuse(name)

    NotServed.__name__, NotServed.__qualname__ = real.__name__, real.__qualname__
    NotServed.__module__ = real.__module__
    return NotServed


def _function(name: str) -> Callable[..., Any]:
    def not_served(*arguments: Any, **options: Any) -> NoReturn:
        _refuse(name)

    return not_served


def _refuse(name: str) -> NoReturn:
    raise StandInGap(f"{name} needs a real GPU; the CUDA stand-in of this rehearsal cannot emulate it")
