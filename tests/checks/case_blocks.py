"""Reads the Markdown file of a check: its Python blocks are scripts whose comments say what is to be found in them.

A diff block is the remedy that is printed for the case before it, applied. Its first lines are the remedy, word for
word; a hunk has no line numbers, and is looked for after the one before it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(r"^```(python|diff)[ \t]*([^\n]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"\b(error|warning|advice): \[([a-z0-9-]+)\]")
_OK = re.compile(r"#\s*ok\b")
_COMMENT = re.compile(r"[ \t]*#[ \t]*(?:(?:error|warning|advice): \[.*|ok\b.*)$", re.MULTILINE)

Mark = tuple[str, int, str, str]
"""File, line, severity and name of a finding."""


class Mend(NamedTuple):
    """A remedy, and what it makes of the case that it is printed for."""

    said: tuple[str, ...]
    """Every remedy of the check that is printed for the case."""
    files: dict[str, str]


class Case(NamedTuple):
    """An entry script with the project files that it imports."""

    line: int
    """Line of the entry's block in the Markdown file."""
    files: dict[str, str]
    """Text by relative path; the entry is ``train.py``."""
    only: frozenset[str]
    """Names of the checks that the case is about; empty when it is about all of them."""
    mends: list[Mend]

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
        if block[1] == "diff":
            assert cases and not files, f"{path}: a diff mends the case before it"
            cases[-1].mends.append(_mend(cases[-1].files, block[3], path))
            continue
        options = dict(option.split("=", 1) for option in block[2].split())
        assert options.keys() <= {"file", "only"}, f"{path}: unknown options {options}"
        name = options.get("file", "train.py")
        files[name] = block[3]
        if "file" not in options:
            only = frozenset(filter(None, options.get("only", "").split(",")))
            cases.append(Case(text.count("\n", 0, block.start()) + 1, files, only, []))
            files = {}
    assert not files, f"{path}: a block with a file= has no entry script after it"
    return cases


def _mend(files: dict[str, str], diff: str, path: Path) -> Mend:
    head, *hunks = re.split(r"^@@\n", diff, flags=re.MULTILINE)
    said = [line for line in head.splitlines() if not line.startswith("+++ ")]
    named = [line.removeprefix("+++ ") for line in head.splitlines() if line.startswith("+++ ")]
    mended = {name: _COMMENT.sub("", text) for name, text in files.items()}
    (name,) = named or ["train.py"]
    done, rest = "", mended[name]
    for hunk in hunks:
        old = "".join(line[1:] or "\n" for line in hunk.splitlines(keepends=True) if line[0] != "+")
        new = "".join(line[1:] or "\n" for line in hunk.splitlines(keepends=True) if line[0] != "-")
        at = ("\n" + rest).find("\n" + old)
        assert old and at >= 0, f"{path}: this is not in the case:\n{old}"
        done, rest = done + rest[:at] + new, rest[at + len(old) :]
    return Mend(tuple(said), mended | {name: done + rest})


def _marks_in(name: str, text: str) -> list[Mark]:
    found: list[Mark] = []
    for number, line in enumerate(text.splitlines(), start=1):
        _, _, comment = line.rpartition("#")
        found.extend((name, number, mark[1], mark[2]) for mark in _MARK.finditer(comment))
    return found
