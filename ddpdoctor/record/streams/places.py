"""Where in the code ranks were: the stacks of their threads, and the lines of the user's files that they ran."""

from __future__ import annotations

import msgspec

from ddpdoctor.finding import Frame


class StackDump(msgspec.Struct, frozen=True, kw_only=True):
    """The stack of one thread of a rank, innermost frame first, torch's frames included."""

    rank: int
    thread: str
    main: bool
    daemon: bool = True
    """The process does not wait for this thread at its end."""
    frames: tuple[Frame, ...] = ()
    native: tuple[str, ...] = ()
    """C++ functions that it is in beyond these frames, innermost first, where they were read."""
    time_ns: int = 0
    native_end: bool = False
    """A signal ended the process then, from a thread that runs no Python, as those are in which gloo and NCCL work."""
    of_the_end: bool = False
    """A signal ended the process at this place."""


class LinesExecuted(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of a user's file that a rank ran."""

    rank: int
    file: str
    lines: frozenset[int] = frozenset()
    unwatched: frozenset[int] = frozenset()
    """First lines of functions that ran so much that only part of what they did is known."""
    by_chance: frozenset[int] = frozenset()
    """Those of ``lines`` that were run first when only the clock decided how far the script would come."""
    late: bool = False
    """Only lines that ran after a model was wrapped or a loader drawn from are known."""
