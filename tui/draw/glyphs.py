"""The signs of the screen, in full Unicode and for terminals that have ASCII only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rich.style import Style

# Styles by role, for dark and light terminals and for those without colour.

Tone = Literal["dark", "light", "none"]
PHASES = ("data", "forward", "backward", "waiting", "transfer", "explicit", "optimizer", "other")

_HUES = {
    "background": ("#11151a", "#fbfaf7"),
    "cursor": ("#24303d", "#dfe7ee"),
    "text": ("#d5dbe1", "#22272c"),
    "strong": ("#ffffff", "#000000"),
    "dim": ("#8a949e", "#667079"),
    "faint": ("#4a545e", "#b4bbc2"),
    "good": ("#2fb58a", "#00745a"),
    "warning": ("#f0b429", "#9a6400"),
    "bad": ("#ff6f3c", "#bf3f00"),
    "advice": ("#66b8e8", "#005f9e"),
    "accent": ("#66b8e8", "#005f9e"),
    "data": ("#e69f00", "#d18f00"),
    "forward": ("#3d8fd1", "#1f78b8"),
    "backward": ("#66b8e8", "#58ade0"),
    "waiting": ("#ff6f3c", "#d55e00"),
    "transfer": ("#d583b3", "#c06a9c"),
    "explicit": ("#f0e442", "#c9bb1a"),
    "optimizer": ("#2fb58a", "#009e73"),
    "other": ("#78828c", "#98a1a9"),
    "on_fill": ("#0b0e11", "#ffffff"),
}
"""By role on a dark background, and on a light one."""


@dataclass(frozen=True, slots=True)
class Palette:
    """Styles by role; a role that ends in ``!`` is under the cursor."""

    background: str
    text: str
    styles: Mapping[str, Style]
    _cache: dict[str, Style] = field(default_factory=dict, compare=False, repr=False)

    def style(self, role: str) -> Style:
        """Return the style of a role; raises KeyError for a role that does not exist."""
        known = self._cache.get(role)
        if known is None:
            known = self.styles[role.rstrip("!")]
            if role.endswith("!"):
                known = known + self.styles["cursor"]
            self._cache[role] = known
        return known


def palette_of(tone: Tone) -> Palette:
    """Return the palette of a tone."""
    if tone == "none":
        return Palette("", "", _colourless())
    hues = {role: dark if tone == "dark" else light for role, (dark, light) in _HUES.items()}
    return Palette(hues["background"], hues["text"], _coloured(hues))


def _coloured(hues: Mapping[str, str]) -> dict[str, Style]:
    styles = {
        "": Style(color=hues["text"]),
        "strong": Style(color=hues["strong"], bold=True),
        "dim": Style(color=hues["dim"]),
        "faint": Style(color=hues["faint"]),
        "code": Style(color=hues["accent"]),
        "series": Style(color=hues["accent"]),
        "cursor": Style(bgcolor=hues["cursor"]),
        "tab": Style(color=hues["dim"]),
        "tab.on": Style(color=hues["on_fill"], bgcolor=hues["accent"], bold=True),
        "key": Style(color=hues["accent"], bold=True),
        "badge.demo": Style(color=hues["on_fill"], bgcolor=hues["transfer"], bold=True),
        "badge.paused": Style(color=hues["on_fill"], bgcolor=hues["warning"], bold=True),
    }
    for role in ("good", "warning", "bad", "advice"):
        styles[role] = Style(color=hues[role], bold=True)
        styles[f"badge.{role}"] = Style(color=hues["on_fill"], bgcolor=hues[role], bold=True)
        styles[f"edge.{role}"] = Style(color=hues[role])
    for phase in PHASES:
        styles[f"phase.{phase}"] = Style(color=hues[phase])
        styles[f"on.{phase}"] = Style(color="#0b0e11", bgcolor=hues[phase])
    for level, hue in enumerate(("faint", "dim", "data", "warning", "bad")):
        styles[f"heat.{level}"] = Style(color=hues[hue])
    styles["over"] = Style(color=hues["faint"])
    styles["series.over"] = Style(color=hues["accent"], bgcolor=hues["faint"])
    ground = Style(bgcolor=hues["background"])
    return {role: ground + style for role, style in styles.items()}


def _colourless() -> dict[str, Style]:
    plain, bold, dim, reverse = Style(), Style(bold=True), Style(dim=True), Style(reverse=True)
    styles = {"": plain, "strong": bold, "dim": dim, "faint": dim, "code": plain, "series": plain, "cursor": reverse}
    styles |= {"over": dim, "series.over": plain}
    styles |= {"tab": plain, "tab.on": reverse, "key": bold, "badge.demo": reverse, "badge.paused": reverse}
    for role in ("good", "warning", "bad", "advice"):
        styles |= {role: bold, f"badge.{role}": reverse, f"edge.{role}": plain}
    for phase in PHASES:
        styles |= {f"phase.{phase}": plain, f"on.{phase}": plain}
    return styles | {f"heat.{level}": bold if level > 2 else plain for level in range(5)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """One set of signs, full Unicode by default; each is one column wide."""

    levels: str = " ▁▂▃▄▅▆▇█"
    """From nothing to full, for sparklines and strips; 9 signs."""
    full: str = "█"
    """A bar."""
    empty: str = "░"
    """The rest of a bar."""
    limit: str = "│"
    """A mark in a bar."""
    rule: str = "─"
    """A horizontal line."""
    bar_between: str = "│"
    """A vertical line."""
    good: str = "●"
    warning: str = "▲"
    bad: str = "■"
    advice: str = "○"
    cursor: str = "▌"
    """Before the row under the cursor."""
    culprit: str = "◀"
    unknown: str = "—"
    dots: str = "…"
    down: str = "↓"
    """A table is sorted from small to great."""
    up: str = "↑"
    plain: bool = False
    """Nothing but ASCII may be drawn."""


UNICODE = Glyphs()
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
