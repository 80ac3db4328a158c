"""The clock of everything that is recorded: the time of the epoch, without the jumps of a clock that is set.

A rank and its monitor run on one machine and so have one monotonic clock; all add what lay between it and the time of
the epoch when the first process of the run on this machine began, which the run's plan says.
"""

from __future__ import annotations

import os
import time
from typing import Any

_BOOT_FILE = "/proc/sys/kernel/random/boot_id"
_NAMESPACE_LINK = "/proc/self/ns/time"
"""In another one of these the monotonic clock counts from another moment."""
_offset_ns = time.time_ns() - time.monotonic_ns()


def epoch_ns() -> int:
    """Return the time since the epoch in ns, which only grows."""
    return time.monotonic_ns() + _offset_ns


def offset_ns() -> int:
    """Return what gives the time since the epoch when it is added to the monotonic clock, in ns."""
    return _offset_ns


def from_system(time_ns: int) -> int:
    """Return a time of the system's own clock, as it is set now, on this one."""
    return time_ns - time.time_ns() + epoch_ns()


def kept_clock() -> dict[str, Any]:
    """Return what a run's plan says of the clock, for all processes of the run on this machine."""
    return {"counts_from": _counts_from(), "offset_ns": _offset_ns, "host": os.uname().nodename}


def share_clock(kept: object) -> None:
    """Take the clock of a run's plan, if it was kept since this machine was started; else keep the own one."""
    global _offset_ns
    if isinstance(kept, dict) and isinstance(kept.get("offset_ns"), int):
        since = _counts_from()
        if since and kept.get("counts_from") == since:
            _offset_ns = kept["offset_ns"]


def kept_elsewhere(kept: object) -> str:
    """Return the name of the machine on which a run was started; empty where that is this one, or is not known."""
    if not isinstance(kept, dict):
        return ""
    since, host = _counts_from(), kept.get("host")
    away = bool(since) and kept.get("counts_from") not in ("", since)
    return host if away and isinstance(host, str) and host != os.uname().nodename else ""


def _counts_from() -> str:
    """Name the moment from which the monotonic clock counts; empty where the system does not tell it."""
    try:
        with open(_BOOT_FILE, encoding="ascii") as file:
            boot = file.read().strip()
    except (OSError, ValueError):
        return ""
    try:
        return f"{boot} {os.readlink(_NAMESPACE_LINK)}"
    except OSError:
        return boot
