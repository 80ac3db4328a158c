"""Makes text from outside harmless: file names, exception messages and source lines may hold terminal commands."""

from __future__ import annotations

import re

_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and line feed
    "\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff"  # invisible or changing the direction of what follows
    "\ud800-\udfff"  # halves of characters that no stream can encode
    "\U000e0000-\U000e007f]"  # invisible tags
)


def visible(text: str) -> str:
    """Replace characters that a terminal obeys or hides by their escapes; line feeds stay, tabs become spaces."""
    return _HARMFUL.sub(_escape, text.expandtabs(4))


def one_line(text: str) -> str:
    """Like ``visible``, with all white space, line feeds included, folded into single spaces."""
    return visible(" ".join(text.split()))


def _escape(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode("ascii")
