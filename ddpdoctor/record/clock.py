"""The clock of everything that is recorded: the time of the epoch, without the jumps of a clock that is set.

A rank and its monitor run on one machine and so have one monotonic clock; each adds what lay between it and the time
of the epoch when it started.
"""

from __future__ import annotations

import time

EPOCH_NS = time.time_ns() - time.monotonic_ns()
"""Added to the monotonic clock it gives the time since the epoch as it was counted when this process began."""


def epoch_ns() -> int:
    """Return the time since the epoch in ns, which only grows."""
    return time.monotonic_ns() + EPOCH_NS


def from_system(time_ns: int) -> int:
    """Return a time of the system's own clock, as it is set now, on this one."""
    return time_ns - time.time_ns() + epoch_ns()
