"""Patterns of paths as in ``.gitignore``: those of Git's own files and those of the settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec


class Pattern(msgspec.Struct, frozen=True):
    """One line of a ``.gitignore``."""

    text: str
    """As it was written."""
    expression: re.Pattern[str]
    """Matches a path relative to the directory of the pattern, with forward slashes."""
    negated: bool
    """It takes back what an earlier pattern matched."""
    directories_only: bool


def parse_patterns(lines: Iterable[str]) -> tuple[Pattern, ...]:
    """Read patterns; blank lines, comments, and lines that are no valid pattern are left out."""
    return tuple(pattern for line in lines if (pattern := _parsed(line)) is not None)


def matches(patterns: Sequence[Pattern], path: str, *, directory: bool) -> bool | None:
    """Tell whether the last pattern that speaks of ``path`` matches it; None when none does."""
    for pattern in reversed(patterns):
        if (directory or not pattern.directories_only) and pattern.expression.fullmatch(path):
            return not pattern.negated
    return None


def matches_below(patterns: Sequence[Pattern], path: str) -> bool:
    """Tell whether a file, or a directory above it, is matched; nothing below a matched directory is taken back."""
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
    try:
        expression = re.compile(("" if anchored else "(?:.*/)?") + _translated(body.lstrip("/")), re.DOTALL)
    except re.error:
        return None
    return Pattern(text, expression, negated, directories_only)


_PIECE = re.compile(
    r"(?P<above>(?:^|(?<=/))\*\*/)|(?P<below>(?<=/)\*\*$)|(?P<stars>\*+)|(?P<one>\?)"
    r"|(?P<set>\[[!^]?\]?[^\]/]*\])|\\(?P<escaped>.)|(?P<plain>.)",
    re.DOTALL,
)


def _translated(body: str) -> str:
    result: list[str] = []
    for piece in _PIECE.finditer(body):
        kind, text = piece.lastgroup, piece.group()
        if kind == "above":
            result.append("(?:.*/)?")
        elif kind == "below":
            result.append(".+")
        elif kind == "stars":
            result.append("[^/]*")
        elif kind == "one":
            result.append("[^/]")
        elif kind == "set":
            inner = text[1:-1].replace("\\", "\\\\")
            result.append(f"[^/{inner[1:]}]" if inner[:1] in "!^" else f"[{inner}]")
        else:
            result.append(re.escape(piece.group("escaped") or text))
    return "".join(result)
