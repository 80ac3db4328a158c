"""What is asked of a rehearsal, and what it says while it runs."""

from __future__ import annotations

from pathlib import Path

import msgspec


class RehearsalRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A script to rehearse, and the bounds of the rehearsal."""

    script: Path
    """Absolute path."""
    arguments: tuple[str, ...] = ()
    spawns_ranks: bool = False
    """The script starts its ranks itself (``mp.spawn``), so it is run by plain Python."""
    nproc: int = 2
    batches: int = 4
    """Batches that a pass over a loader yields before it is cut."""
    time_limit_s: float = 120.0
    python: str | None = None
    """Interpreter for the ranks; None: found by ``launch.interpreter``."""
    allow_writes: bool = False
    """The ranks may change files that existed before."""
    keep: bool = False
    """Files that the ranks made stay."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """One line of news about a rehearsal that runs."""

    phase: str
    """A few words: ``starting 2 ranks``, ``training``, ``ending``."""
    steps: int = 0
    seconds: float = 0.0
