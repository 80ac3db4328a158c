"""How figures of a run are written: None is —, never 0."""

from __future__ import annotations

UNKNOWN = "—"


def milliseconds(ns: float | None) -> str:
    """Write a duration in milliseconds with three digits or so; from 10 s on in seconds, with the unit."""
    if ns is None:
        return UNKNOWN
    value = ns / 1e6
    if value >= 9_999.5:
        return f"{value / 1e3:.0f}s"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def in_milliseconds(ns: float | None) -> str:
    """Write a duration like ``milliseconds``, with the unit in any case."""
    text = milliseconds(ns)
    return text if text == UNKNOWN or text.endswith("s") else f"{text} ms"


def percent(share: float | None) -> str:
    """Write a share as a whole percentage."""
    return UNKNOWN if share is None else f"{100 * share:.0f} %"


def rate(value: float | None) -> str:
    """Write a number per second with three digits or so."""
    if value is None:
        return UNKNOWN
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def size(size_bytes: float | None) -> str:
    """Write a size in powers of ten: ``4.2 MB``."""
    if size_bytes is None:
        return UNKNOWN
    for unit, factor in (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12)):
        if size_bytes < 999.5 * factor or unit == "TB":
            value = size_bytes / factor
            return f"{value:,.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"
    raise AssertionError("unreachable")


def seconds(ns: float) -> str:
    """Write a time span in the unit that suits it."""
    value = ns / 1e9
    if value < 120:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7_200 else f"{value / 3_600:.1f} h"


def share_of(part: float | None, whole: float | None) -> float | None:
    """Return a part of a whole; None where either is not known."""
    return None if part is None or not whole else part / whole


def added(one: float | None, other: float | None) -> float | None:
    """Return the sum of what is known; None where nothing is."""
    return None if one is None and other is None else (one or 0.0) + (other or 0.0)
