"""What a gate has to say beyond its findings: the data that reports render."""

from __future__ import annotations

from typing import Literal

import msgspec

from ddpdoctor.finding import Location

Change = Literal["same", "grown", "within", "shrunk", "new"]
"""``within``: grown, and by no more than is allowed; ``new``: there is nothing to compare with."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """What one line contributes to a figure that changed."""

    what: str
    """What is done there, such as ``all_reduce``."""
    location: Location | None
    """Where it stands now; None when it is gone, or no line of the user's did it."""
    shown: str
    """The same as a text, ``train.py:40``; of a line that is gone where it stood."""
    before: float
    now: float


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of the budget, now and before."""

    metric: str
    label: str
    """In words: ``collectives a step``."""
    unit: Literal["", "bytes"] = ""
    before: float | None
    """None when there is nothing to compare with."""
    now: float
    change: Change
    differences: tuple[Difference, ...] = ()
    """The lines that changed, what brought most first."""


class TimeComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Step times of pairs of rehearsals, one of each revision."""

    pairs: int
    steps: int
    """Steps of each side that were timed."""
    before_ms: float
    """Median of a step."""
    now_ms: float
    change: float
    """0.05 is 5% slower."""
    low: float
    """The 95% interval of ``change`` …"""
    high: float
    allowed: float
    slower: bool
    """The whole interval lies above what is allowed."""
    note: str = ""
    """Why there is no interval, or what it lacks."""


class GateSection(msgspec.Struct, frozen=True, kw_only=True):
    """A gate's comparison of one target."""

    against: str
    """The baseline file, or ``the revision REV``."""
    written: bool = False
    """The baseline was written, or made smaller."""
    known: int = 0
    """Findings that the baseline holds and that are still there."""
    gone: tuple[str, ...] = ()
    """Findings of the baseline that are there no more, as sentences."""
    allowed_growth: float = 0.0
    steps: int = 0
    """Steps that the figures rest on."""
    doubt: str = ""
    """Why it could not be compared, as a clause; the verdict is inconclusive then."""
    figures: tuple[Figure, ...] = ()
    times: TimeComparison | None = None
    reproduce: str = ""
    """The command, to be pasted, that gates this target again."""
    accept: str = ""
    """The one that writes the baseline anew; empty where there is none."""
    notes: tuple[str, ...] = ()
