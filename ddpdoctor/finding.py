"""What the doctor says: a finding, its place, its evidence and its severity."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Literal, TypeAlias

import msgspec

Basis = Literal["source", "rehearsal", "run", "log", "dump"]
"""How a fact is known: read in the source, seen in a rehearsal, in a live run, in logs, or in dumps."""


Trouble = Literal[
    # The ranks part, or wait for what does not come.
    "rank-branch",
    "data-branch",
    "lone-forward",
    "mismatch",
    "desync",
    "uneven-passes",
    "subset-group",
    "shared-group",
    "ddp-on-subset",
    "caught-exception",
    "early-exit",
    "hang",
    "long-wait",
    "timeout",
    # A rank fails or dies by itself.
    "exception",
    "killed",
    "out-of-memory",
    "shared-memory",
    "nccl-error",
    "gpu-fault",
    "no-rendezvous",
    "port-in-use",
    "no-backend",
    "local-rank-argument",
    "wrong-rank-kind",
    "cuda-after-fork",
    "cpu-tensor",
    "missing-device",
    "lacking-machine",
    "unused-parameters",
    "ready-twice",
    "wrapper-attribute",
    # Ranks meet at a path.
    "download-race",
    "early-read",
    "path-race",
    "many-writers",
    # Something is not as it was meant, or slow.
    "no-wrap",
    "hot-barrier",
    "exposed-communication",
    "straggler",
    "input-bound",
]
"""What went wrong, as diagnosis and reports know it; ``Check.stands_for`` says which check speaks for it."""
_FAMILIES = {
    "1": "data",
    "2": "gradients",
    "3": "collectives",
    "4": "speed",
    "5": "launch",
    "6": "state",
    "7": "death",
}
"""By the first digit of a built-in check's code."""


class Severity(str, Enum):
    """How bad a finding is; the order of the members is from worst to mildest."""

    ERROR = "error"
    """The job hangs, dies, or computes something other than what was asked."""
    WARNING = "warning"
    """Probably wrong or wasteful, or right by luck."""
    ADVICE = "advice"
    """Works; could be better. Never fails a run by default."""

    def at_least(self, threshold: Severity) -> bool:
        """Tell whether this severity is as bad as ``threshold`` or worse."""
        members = list(Severity)
        return members.index(self) <= members.index(threshold)


class Frame(msgspec.Struct, frozen=True, order=True):
    """One line of a call chain in the user's code."""

    file: str
    """Absolute path."""
    line: int
    """1-based."""
    function: str = ""
    """Name of the enclosing function; ``<module>`` at top level."""


class Location(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A region of a source file; all numbers are 1-based, ``end_column`` is exclusive."""

    file: str
    """Absolute path inside the program; reports print it relative to the working directory."""
    line: int
    column: int = 1
    end_line: int = 0
    """0 when only the line is known."""
    end_column: int = 0
    """0 when only the line is known."""
    function: str = ""
    """Qualified name of the enclosing function, empty at module level."""

    def holds(self, other: Location) -> bool:
        """Tell whether ``other`` starts inside the lines of this location."""
        return self.file == other.file and self.line <= other.line <= max(self.line, self.end_line)


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of evidence: a sentence, the numbers in it, and where and how it was seen."""

    text: str
    """A whole sentence without a full stop, with numbers and units."""
    basis: Basis
    numbers: Mapping[str, int | float] = {}
    """The numbers of the sentence for machines; the unit is in the key (``bytes_per_step``)."""
    rank: int | None = None
    location: Location | None = None
    stack: tuple[Frame, ...] = ()
    """Innermost frame first."""


NAMED_BECAUSE = "is named because"
"""In the fact that says why the run blames a rank, which does not hold where the source blames another."""
MOST_TIMES = 100.0
"""A gain is reported up to so many times, and what is beyond it as no bound; infinity is no number in JSON."""


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """What mending one finding alone is predicted to bring."""

    speedup: float
    """How many times as many samples a second."""
    low: float
    high: float
    """Nine in ten times it lies between these; no bound where it is ``MOST_TIMES``."""

    @property
    def text(self) -> str:
        """``1.45 times as fast, if only this is fixed (1.30 to 1.55)``."""
        most = f"to {self.high:.2f}" if self.high < MOST_TIMES else "or more"
        return f"{self.speedup:.2f} times as fast, if only this is fixed ({self.low:.2f} {most})"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One cause, stated once."""

    code: str
    name: str
    trouble: Trouble | None = None
    """What the check stands for, where the rest of the program knows it."""
    severity: Severity
    title: str
    """One sentence, no full stop, with the numbers that matter."""
    ranks: tuple[int, ...] = ()
    """The ranks concerned, ascending; empty when it concerns all of them or none in particular."""
    locations: tuple[Location, ...] = ()
    """The first is the primary one."""
    basis: frozenset[Basis]
    evidence: tuple[Fact, ...] = ()
    remedy: str
    """What to do, in one or two sentences."""
    unconfirmed: str = ""
    """What a rehearsal that did not confirm a suspicion of the source says of it, as in ``not rehearsed: no rank
    reached train.py:88``; empty when it confirmed it or cannot speak of it.
    """
    stress: str = ""
    """The injected cause under which it was seen; empty when it happens by itself."""
    what_if: tuple[str, ...] = ()
    """How a job is predicted in which it is mended: settings as ``ddpdoctor what-if --set`` takes them."""
    gain: Gain | None = None
    """What mending it alone brings; None where nothing is known of that."""
    role: Literal["", "cause", "echo"] = ""
    """In an autopsy: the first cause of the death, or what followed from it."""
    doubt: str = ""
    """In an autopsy: why it is not certain that this is the cause; empty where it is."""
    fingerprint: str = ""
    """Survives line moves; filled in when findings are merged."""

    @property
    def family(self) -> str:
        """The family of the built-in check, such as ``collectives``; empty for any other."""
        return _FAMILIES.get(self.code[3:4], "") if self.code.startswith("DDP") else ""

    @property
    def advice(self) -> str:
        """The remedy, and what it is predicted to bring, where that is known."""
        return self.remedy if self.gain is None else f"{self.remedy} Predicted: {self.gain.text}."

    @property
    def location(self) -> Location | None:
        """The primary location, if the finding has a place."""
        return self.locations[0] if self.locations else None


class Refuted(msgspec.Struct, frozen=True, kw_only=True):
    """A run proved that what the same check suspected at this place of the source is not so."""

    location: Location
    reason: str


class Confirmed(msgspec.Struct, frozen=True, kw_only=True):
    """A run showed what the same check suspected at this place of the source; without the suspicion it says nothing."""

    location: Location
    fact: Fact
    """What the run showed."""


FoundInRun: TypeAlias = "Finding | Refuted | Confirmed"
"""What a check yields of a run."""
