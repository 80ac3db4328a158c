"""Patterns of paths as in ``.gitignore``: those of Git's own files and those of the settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec


class Pattern(msgspec.Struct, frozen=True):
    """One line of a ``.gitignore``."""

    text: str
    """As it was written."""
    segments: tuple[re.Pattern[str] | None, ...]
    """What a path relative to the directory of the pattern consists of; None is any number of directories."""
    negated: bool
    """It takes back what an earlier pattern matched."""
    directories_only: bool


def parse_patterns(lines: Iterable[str]) -> tuple[Pattern, ...]:
    """Read patterns; blank lines, comments, and lines that are no valid pattern are left out."""
    return tuple(pattern for line in lines if (pattern := _parsed(line)) is not None)


def matches(patterns: Sequence[Pattern], path: str, *, directory: bool) -> bool | None:
    """Return whether the last pattern that speaks of ``path`` matches it; None when none does."""
    for pattern in reversed(patterns):
        if (directory or not pattern.directories_only) and _fits(pattern.segments, path.split("/")):
            return not pattern.negated
    return None


def matches_below(patterns: Sequence[Pattern], path: str) -> bool:
    """Return whether a file, or a directory above it, is matched; nothing below a matched directory is taken back."""
    parts = path.split("/")
    for length in range(1, len(parts)):
        if matches(patterns, "/".join(parts[:length]), directory=True):
            return True
    return bool(matches(patterns, path, directory=False))


def _parsed(line: str) -> Pattern | None:
    text = line.rstrip("\r\n")
    text = re.sub(r"(?<!\\)[ \t]+$", "", text)
    if not text or text.startswith("#"):
        return None
    negated = text.startswith("!")
    body = text[1:] if negated else text
    directories_only = body.endswith("/")
    body = body.rstrip("/")
    if not body:
        return None
    anchored = "/" in body
    names = body.lstrip("/").split("/")
    segments: list[re.Pattern[str] | None] = [] if anchored else [None]
    try:
        for place, name in enumerate(names):
            if name == "**" and len(names) > 1:
                segments.append(None)
                if place == len(names) - 1:
                    segments.append(re.compile(".*", re.DOTALL))
            else:
                segments.append(re.compile(_translated(name), re.DOTALL))
    except re.error:
        return None
    return Pattern(text, tuple(segments), negated, directories_only)


def _fits(segments: Sequence[re.Pattern[str] | None], names: Sequence[str]) -> bool:
    """Match name by name. To go back to the last of the places that take any directories is enough, so that no pattern
    needs more time than the product of both lengths.
    """
    segment = name = taken = 0
    back: int | None = None
    while name < len(names):
        expression = segments[segment] if segment < len(segments) else _NEVER
        if expression is None:
            segment += 1
            back, taken = segment, name
        elif expression.fullmatch(names[name]):
            segment += 1
            name += 1
        elif back is None:
            return False
        else:
            taken += 1
            segment, name = back, taken
    return segment == len(segments)


_NEVER = re.compile(r"(?!)")
_PIECE = re.compile(r"(?P<stars>\*+)|(?P<one>\?)|(?P<set>\[[!^]?\]?[^\]]*\])|\\(?P<escaped>.)|(?P<plain>.)", re.DOTALL)


def _translated(name: str) -> str:
    """Return the expression for one name. What stands between two stars is taken where it comes first and for good: a
    star that could give back would try, with n others, every way to divide a name among them.
    """
    chunks = [""]
    for piece in _PIECE.finditer(name):
        kind, text = piece.lastgroup, piece.group()
        if kind == "stars":
            chunks.append("")
        elif kind == "one":
            chunks[-1] += "."
        elif kind == "set":
            inner = re.sub(r"[\\\[&~|]", r"\\\g<0>", text[1:-1]).replace("--", r"-\-")
            chunks[-1] += f"[^{inner[1:]}]" if inner[:1] in "!^" else f"[{inner}]"
        else:
            chunks[-1] += re.escape(piece.group("escaped") or text)
    if len(chunks) == 1:
        return chunks[0]
    first, *middle, last = chunks
    taken = "".join(f"(?=(?P<c{number}>.*?{chunk}))(?P=c{number})" for number, chunk in enumerate(middle) if chunk)
    return f"{first}{taken}.*{last}"
