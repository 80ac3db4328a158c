"""Amounts of the budget in words."""

from __future__ import annotations

from ddpdoctor.gate_section import Figure

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def amount(figure: Figure, value: float) -> str:
    """Return a value of a figure, with its unit."""
    if figure.unit != "bytes":
        return f"{value:,.2f}".rstrip("0").rstrip(".")
    for size, unit in _UNITS:
        if value >= size:
            return f"{value / size:,.2f} {unit}"
    return f"{value:,.1f}".removesuffix(".0") + " B"


def share(figure: Figure) -> str:
    """Return the change in percent, such as ``+50 %``; empty where there is none to tell."""
    if figure.before is None or figure.change == "same":
        return ""
    if not figure.before:
        return "new"
    return f"{100 * (figure.now - figure.before) / figure.before:+.1f} %"
