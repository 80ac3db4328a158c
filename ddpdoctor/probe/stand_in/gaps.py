"""What the stand-in cannot serve: it says so, by name, at the user's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


class StandInGap(RuntimeError):
    """The script needs something that only a real GPU has."""


class Gaps:
    """Writes down what was asked for and is not there, and raises."""

    def __init__(self, note: Callable[[str], object]) -> None:
        self._note = note
        """Takes the name of what is missing; called once for each."""
        self._noted: set[str] = set()

    def missing(self, name: str) -> NoReturn:
        """Raise ``StandInGap`` for ``name``, as the user would spell it."""
        if name not in self._noted:
            self._noted.add(name)
            self._note(name)
        raise StandInGap(f"{name} needs a real GPU; the CUDA stand-in of this rehearsal cannot serve it")

    def standing_for(self, name: str, real: Any) -> Any:
        """Return what stands in the place of ``real`` until it is used: a function for a function, and a class for a
        class.

        A class is a subclass of the real one: annotations (``CUDAGraph | None``) and ``isinstance`` go on as before.
        """
        return self._class(name, real) if isinstance(real, type) else self.function(name)

    def _class(self, name: str, real: type) -> type:
        gaps = self

        class NotServed(real):  # type: ignore[misc]
            """Raises when an object is made of it."""

            def __new__(cls, *arguments: Any, **options: Any) -> Any:  # noqa: ARG004 - those of the real one
                gaps.missing(name)

        NotServed.__name__, NotServed.__qualname__ = real.__name__, real.__qualname__
        NotServed.__module__ = real.__module__
        return NotServed

    def function(self, name: str) -> Callable[..., Any]:
        """Return a function that stands where ``name`` would be, and raises when it is called."""

        def not_served(*arguments: Any, **options: Any) -> NoReturn:
            self.missing(name)

        return not_served
