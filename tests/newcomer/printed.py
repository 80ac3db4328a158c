"""The commands that the README and the pages of ``docs`` print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.M | re.S)
_CODE = re.compile(r"`([^`]+)`")
_PROMPT = re.compile(r"^\w+\$ ")
_TOOL = re.compile(r"^(?:\.venv/bin/)?ddpdoctor [a-z]")


class Printed(NamedTuple):
    """A command, and the first page that prints it."""

    page: str
    command: str


def printed() -> tuple[Printed, ...]:
    """Return every command of ``ddpdoctor`` once, by pages: in a block for a shell, or between backticks."""
    found: dict[str, Printed] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [line for language, block in _BLOCK.findall(text) if language == "sh" for line in block.splitlines()]
        spans = [" ".join(span.split()) for span in _CODE.findall(_BLOCK.sub("", text))]
        for piece in (piece for line in (*lines, *spans) for piece in re.split(r" && |\$\(|\)\"", line)):
            command = _PROMPT.sub("", piece.partition("  #")[0]).strip().removeprefix(".venv/bin/")
            if _TOOL.match(command) and not command.endswith(" --") and command not in found:
                found[command] = Printed(page.name, command)
    return tuple(found.values())


def words_of(command: str) -> list[str]:
    """Return the words behind ``ddpdoctor``, without what a shell does with the output."""
    return shlex.split(re.split(r" > | \| ", command)[0])[1:]
