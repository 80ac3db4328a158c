"""Makes text from outside harmless: file names, exception messages and source lines may hold commands.

A terminal obeys control characters. The log of a CI obeys text: GitHub a line that begins with ``::error::`` after
blanks, Azure, GitHub and TeamCity what looks like ``##vso[``, ``##[`` or ``##teamcity[`` anywhere in it.
"""

from __future__ import annotations

import re

_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and line feed
    "\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff"  # invisible or changing the direction of what follows
    "\ud800-\udfff"  # halves of characters that no stream can encode
    "\U000e0000-\U000e007f]"  # invisible tags
    r"|#(?=#[A-Za-z]*\[)"
)
_COMMAND = re.compile(r"^(\s*):(?=:[A-Za-z])", re.MULTILINE)
_LONGEST = 20_000
"""Characters of one text on one line; an exception's message may have millions."""


def visible(text: str) -> str:
    """Replace what a terminal or a CI obeys, or hides, by its escapes; line feeds stay, tabs become spaces.

    Where a line begins is decided later: see ``without_commands``.
    """
    return _HARMFUL.sub(_escape, text.expandtabs(4))


def one_line(text: str) -> str:
    """Like ``visible``, with all white space, line feeds included, folded into single spaces."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
    return visible(" ".join(text.split()))


def without_commands(lines: str) -> str:
    """Return lines as they are written, of which no log takes one for a command, wherever a text was folded."""
    return _COMMAND.sub(r"\1\\x3a", lines)


def _escape(match: re.Match[str]) -> str:
    character = match.group()
    return "\\x23" if character == "#" else character.encode("unicode_escape").decode("ascii")
