"""The calls and loops that a rank projection is in."""

from __future__ import annotations

from collections.abc import Callable

from ddpdoctor.finding import Frame
from ddpdoctor.source.events import LoopAround
from ddpdoctor.source.interpreter.scopes import Cell
from ddpdoctor.source.interpreter.values import Function, Value
from ddpdoctor.source.script.module import Module


class CallFrame:
    """One call of a project function."""

    def __init__(self, function: str, module: Module, scope: int, outer_scopes: tuple[int, ...]) -> None:
        self.function = function
        self.module = module
        self.scope = scope
        self.scopes = (scope, *outer_scopes)
        """Scopes that names are looked up in, innermost first."""
        self.globals: set[str] = set()
        self.nonlocals: set[str] = set()
        self.results: list[tuple[int, Value]] = []
        """What was returned, by mask of ranks."""
        self.left_behind: list[dict[Cell, Value]] = []
        """What paths wrote that returned early."""
        self.on_yield: Callable[[Value], None] | None = None
        self.yielded: Value | None = None
        """What a generator gives for any of its items, unless ``on_yield`` takes them."""
        self.owner: Function | None = None
        self.file = str(module.path)
        self.around: tuple[list[Frame], tuple[Frame, ...], tuple[int, ...]] | None = None
        """The call sites when something was last recorded here, innermost first, and the scopes of all frames."""


class LoopFrame:
    """One loop that is being walked."""

    def __init__(self, around: LoopAround) -> None:
        self.around = around
        self.left = 0
        """Mask of the ranks that left the turn by ``break`` or ``continue``."""
        self.left_behind: list[dict[Cell, Value]] = []
