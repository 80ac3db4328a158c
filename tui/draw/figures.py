"""Numbers as people read them: three significant digits, units in words, a dash for what is not known."""

from __future__ import annotations

import math

UNKNOWN = "—"
"""What is not known; never 0. The glyphs of a plain terminal replace it."""


def three(value: float | None) -> str:
    """Three significant digits, thousands grouped, without an exponent below a million million."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    rounded = round(value, 2 - magnitude)
    if abs(rounded) >= 10 ** (magnitude + 1):
        magnitude += 1
    return f"{rounded:,.{min(9, max(0, 2 - magnitude))}f}"


def _scaled(value: float | None, units: tuple[tuple[float, str], ...]) -> str:
    """In the greatest of the units, smallest first, that leaves at least 1 after rounding to three digits."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    chosen = units[0]
    for unit in units:
        if abs(value) >= unit[0] * 0.9995:
            chosen = unit
    scaled = value / chosen[0]
    return f"{count(int(scaled)) if scaled == int(scaled) and chosen is units[0] else three(scaled)} {chosen[1]}"


_DURATIONS = ((1.0, "ns"), (1e3, "µs"), (1e6, "ms"), (1e9, "s"))
_BYTES = ((1.0, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB"))
_BINARY = ((1.0, "B"), (2.0**10, "KiB"), (2.0**20, "MiB"), (2.0**30, "GiB"), (2.0**40, "TiB"))


def duration(ns: float | None) -> str:
    """Return a measured duration: ``198 ms``; from two minutes on as a span."""
    if ns is not None and ns >= 120e9:
        return span(ns)
    return "0" if ns is not None and 0 <= ns < 0.5 else _scaled(ns, _DURATIONS)


def span(ns: float | None) -> str:
    """Return a time that passes: whole seconds, minutes, hours."""
    if ns is None:
        return UNKNOWN
    seconds = max(0, int(ns // 1e9))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02} s"
    if seconds < 86_400:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02} min"
    return f"{seconds // 86_400} d {seconds % 86_400 // 3600:02} h"


def clock(ns: float) -> str:
    """Return a place in a recording: ``3:07``, ``1:02:09``."""
    seconds = max(0, int(ns // 1e9))
    hours, minutes = seconds // 3600, seconds % 3600 // 60
    return f"{hours}:{minutes:02}:{seconds % 60:02}" if hours else f"{minutes}:{seconds % 60:02}"


def size(count: float | None) -> str:
    """Bytes on the way, in powers of 1,000."""
    return _scaled(count, _BYTES)


def memory(count: float | None) -> str:
    """Bytes of memory, in powers of 1,024."""
    return _scaled(count, _BINARY)


def bandwidth(bytes_per_s: float | None) -> str:
    """Bytes per second."""
    text = _scaled(bytes_per_s, _BYTES)
    return text if text == UNKNOWN else f"{text}/s"


def share(ratio: float | None) -> str:
    """Return a ratio as percent: whole, below 10% with one digit."""
    if ratio is None or not math.isfinite(ratio):
        return UNKNOWN
    percent = 100 * ratio
    return f"{percent:.1f}%" if 0 < percent < 9.95 else f"{percent:.0f}%"


def percent(value: float | None) -> str:
    """Return a figure that is percent already."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.0f}%"


def count(value: int | None) -> str:
    """Return a whole number, thousands grouped."""
    return UNKNOWN if value is None else f"{value:,}"


def calls(value: float | None) -> str:
    """Return how often something happens: whole where it is."""
    return count(int(value)) if value is not None and value == int(value) else three(value)


def _with_unit(value: float | None, unit: str) -> str:
    """Three digits and a unit; only a dash when nothing is known."""
    text = three(value)
    return text if text == UNKNOWN else f"{text} {unit}"


def watts(value: float | None) -> str:
    """Return a power."""
    return _with_unit(value, "W")


def megahertz(value: float | None) -> str:
    """Return a clock."""
    return _with_unit(value, "MHz")


def degrees(celsius: float | None) -> str:
    """Return a temperature, whole degrees."""
    return UNKNOWN if celsius is None or not math.isfinite(celsius) else f"{celsius:.0f} °C"
