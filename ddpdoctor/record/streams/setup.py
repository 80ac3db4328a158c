"""What ranks do before and beside training: random numbers, the environment, forked processes; places in the source."""

from __future__ import annotations

from typing import Literal

import msgspec

from ddpdoctor.finding import Frame

# Groups of streams that several checks need.

AVERAGING = frozenset(
    {
        "wraps",
        "wrap_changes",
        "forwards",
        "backwards",
        "missing_gradients",
        "optimizer_steps",
        "gradient_digests",
        "gradients_taken",
        "written_averages",
    }
)
"""What shows whether gradients were averaged over the ranks."""


# Where in the code ranks were: the stacks of their threads, and the lines of the user's files that they ran.


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


Library = Literal["torch", "numpy", "random"]


class Seeding(msgspec.Struct, frozen=True, kw_only=True):
    """A rank fixed the random numbers of a library."""

    rank: int
    library: Library
    site: int = -1
    time_ns: int = 0


class RandomState(msgspec.Struct, frozen=True, kw_only=True):
    """A library's generator just before the first batch of a data set was fetched, in the process that fetched it."""

    rank: int
    library: Library
    dataset_type: str
    dataset_length: int
    worker: int = -1
    """Number of the loader's worker process; -1 in the rank's own process."""
    digest: str = ""
    """Equal digests are equal states, and draw equal numbers."""
    drawn_from: bool = False
    """Fetching the batch moved the state, and did not seed it."""
    file: str = ""
    """Where the data set's ``__getitem__`` is written; empty outside of the user's code."""
    line: int = 0
    end_line: int = 0


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A ``Subset`` of a data set; one that is made of another is described by indices into the innermost data set."""

    rank: int
    part: int
    """Ordinal in its process."""
    site: int = -1
    base_type: str = ""
    base_length: int = 0
    count: int = 0
    index_sum: int = 0
    digest: str = ""
    """Of the sorted indices: equal digests are equal parts."""


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """A list, array or tensor that a data set holds, with one row for each sample."""

    rank: int
    dataset_type: str
    dataset_length: int
    attribute: str
    ordered_digest: str = ""
    """Equal digests are equal rows in an equal order."""
    unordered_digest: str = ""
    """Equal digests are equal rows in any order."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A variable of the environment that bears on the job was set, or removed, after the job had been started."""

    rank: int
    name: str
    value: str
    """Empty where it was removed."""
    removed: bool = False
    previous: str | None = None
    """What it was before; None when it was not set."""
    launched: bool = False
    """A launcher started the process and had said what it needs to know."""
    imported: bool = False
    """torch had been imported before."""
    joined: bool = False
    """The process group had been made before."""
    site: int = -1
    """-1 where no line of the user's in the process of the rank did it."""
    time_ns: int = 0


class ForkedUse(msgspec.Struct, frozen=True, kw_only=True):
    """A process that a rank forked called a collective of the rank's process group."""

    rank: int
    kind: str
    site: int = -1


class CpuThreads(msgspec.Struct, frozen=True, kw_only=True):
    """The threads for torch's computation in a rank, at its first optimizer step."""

    rank: int
    threads: int
    chosen: bool = False
    """The script or the command asked for so many; otherwise the rehearsal did."""
