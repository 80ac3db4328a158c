"""The code blocks of a document: files by their title, patches, and commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(r"^(?P<fence>`{3,})(?P<language>\w+)[ ]*(?P<rest>[^\n]*)\n(?P<text>.*?)^(?P=fence)$", re.M | re.S)
_TITLE = re.compile(r'title="([^"]+)"')


class Block(NamedTuple):
    """One code block."""

    section: str
    """The heading above it."""
    language: str
    title: str
    """The file that it is; empty for others."""
    text: str


def blocks_of(path: Path) -> list[Block]:
    """The code blocks of a Markdown file, in order; those inside of a longer fence are part of it."""
    text = path.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        heading = re.findall(r"^## (.+)$", text[: match.start()], re.MULTILINE)
        title = _TITLE.search(match["rest"])
        found.append(Block(heading[-1] if heading else "", match["language"], title[1] if title else "", match["text"]))
    return found
