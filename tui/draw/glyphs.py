"""The signs of the screen, in full Unicode and for terminals that have ASCII only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """One set of signs; each is one column wide."""

    levels: str
    """From nothing to full, for sparklines and strips; 9 signs."""
    full: str
    """A bar."""
    empty: str
    """The rest of a bar."""
    limit: str
    """A mark in a bar."""
    rule: str
    """A horizontal line."""
    bar_between: str
    """A vertical line."""
    good: str
    warning: str
    bad: str
    advice: str
    cursor: str
    """Before the row under the cursor."""
    culprit: str
    unknown: str
    dots: str
    down: str
    """A table is sorted from small to great."""
    up: str
    plain: bool
    """Nothing but ASCII may be drawn."""


UNICODE = Glyphs(
    levels=" ▁▂▃▄▅▆▇█",
    full="█",
    empty="░",
    limit="│",
    rule="─",
    bar_between="│",
    good="●",
    warning="▲",
    bad="■",
    advice="○",
    cursor="▌",
    culprit="◀",
    unknown="—",
    dots="…",
    down="↓",
    up="↑",
    plain=False,
)
ASCII = Glyphs(
    levels=" ..::-=+#",
    full="#",
    empty=".",
    limit="|",
    rule="-",
    bar_between="|",
    good="*",
    warning="!",
    bad="X",
    advice="o",
    cursor=">",
    culprit="<",
    unknown="-",
    dots="...",
    down="v",
    up="^",
    plain=True,
)

_PLAIN = str.maketrans({"—": "-", "…": "~", "µ": "u", "°": " ", "·": "-", "≥": ">", "≤": "<", "→": ">", "←": "<"})


def plain_text(text: str) -> str:
    """Return the same number of columns in ASCII; what has no likeness becomes a question mark."""
    if text.isascii():
        return text
    from rich.cells import get_character_cell_size

    translated = text.translate(_PLAIN)
    return "".join(
        character if character.isascii() else "?" * get_character_cell_size(character) for character in translated
    )


def chosen_glyphs(environment: Mapping[str, str]) -> Glyphs:
    """ASCII where the locale or the terminal has no more: the C locale, the Linux console, a dumb terminal."""
    if environment.get("TERM", "") in {"dumb", "linux", "vt100", "vt220", ""}:
        return ASCII
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        value = environment.get(name)
        if value:
            return UNICODE if "utf" in value.lower() else ASCII
    return ASCII
