"""One bad input: what is given to the command, and how it may answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

CLEAN, FINDINGS, ERROR, INCONCLUSIVE = 0, 1, 2, 3
ANSWERS = frozenset({CLEAN, FINDINGS, ERROR, INCONCLUSIVE})


@dataclass(frozen=True)
class Case:
    """A command line with all that surrounds it."""

    arguments: tuple[str | bytes, ...]
    allowed: frozenset[int]
    """Exit codes."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """None takes a variable away."""
    stdin: bytes | Path | None = None
    """A path is opened for reading; None is the null device."""
    closed: frozenset[int] = frozenset()
    """Descriptors of standard streams that are closed."""
    deletes_directory: bool = False
    """The working directory is gone when the command starts."""
    may_write: frozenset[str] = frozenset()
    """Names in the working directory that may be made or changed."""
    rehearses: bool = False

    def also(self, *more: str | bytes, allowed: frozenset[int] = frozenset()) -> Case:
        """The same with more options, in front of a ``--``."""
        divide = self.arguments.index("--") if "--" in self.arguments else len(self.arguments)
        arguments = (*self.arguments[:divide], *more, *self.arguments[divide:])
        return replace(self, arguments=arguments, allowed=self.allowed | allowed)


Make = Callable[[Random, Path], Case]
"""Makes the files of a case in its working directory."""
Season = Callable[[Random, Path, Case], Case]
"""Makes a case worse."""
