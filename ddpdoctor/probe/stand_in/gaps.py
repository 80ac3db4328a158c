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

    def function(self, name: str) -> Callable[..., Any]:
        """A function that stands where ``name`` would be, and raises when it is called."""

        def not_served(*arguments: Any, **options: Any) -> NoReturn:
            self.missing(name)

        return not_served
