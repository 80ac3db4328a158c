"""What ranks do before and beside training: random numbers, subsets, the environment, forked processes."""

from __future__ import annotations

from typing import Literal

import msgspec

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
