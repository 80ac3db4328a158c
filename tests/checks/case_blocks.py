"""Reads the Markdown file of a check: its Python blocks are scripts whose comments say what is to be found in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(r"^```python[ \t]*([^\n]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"\b(error|warning|advice): \[([a-z0-9-]+)\]")
_OK = re.compile(r"#\s*ok\b")

Mark = tuple[str, int, str, str]
"""File, line, severity and name of a finding."""


class Case(NamedTuple):
    """An entry script with the project files that it imports."""

    line: int
    """Line of the entry's block in the Markdown file."""
    files: dict[str, str]
    """Text by relative path; the entry is ``train.py``."""
    only: frozenset[str]
    """Names of the checks that the case is about; empty when it is about all of them."""

    @property
    def marks(self) -> list[Mark]:
        """Every mark in the files, sorted."""
        return sorted(mark for name, text in self.files.items() for mark in _marks_in(name, text))

    @property
    def says_ok(self) -> bool:
        """Whether a line is marked as right."""
        return any(_OK.search(text) for text in self.files.values())


def cases_of(path: Path) -> list[Case]:
    """The cases of a Markdown file.

    A block that names its file (```` ```python file=model.py ````) belongs to the next block that names none, which is
    the entry script. ``only=NAME`` (several with commas) leaves other checks out of account.
    """
    text = path.read_text(encoding="utf-8")
    cases: list[Case] = []
    files: dict[str, str] = {}
    for block in _BLOCK.finditer(text):
        options = dict(option.split("=", 1) for option in block[1].split())
        assert options.keys() <= {"file", "only"}, f"{path}: unknown options {options}"
        name = options.get("file", "train.py")
        files[name] = block[2]
        if "file" not in options:
            only = frozenset(filter(None, options.get("only", "").split(",")))
            cases.append(Case(text.count("\n", 0, block.start()) + 1, files, only))
            files = {}
    assert not files, f"{path}: a block with a file= has no entry script after it"
    return cases


def _marks_in(name: str, text: str) -> list[Mark]:
    found: list[Mark] = []
    for number, line in enumerate(text.splitlines(), start=1):
        _, _, comment = line.rpartition("#")
        found.extend((name, number, mark[1], mark[2]) for mark in _MARK.finditer(comment))
    return found
