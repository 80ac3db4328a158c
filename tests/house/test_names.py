"""Names of the user's identifiers are hints: the lists and patterns that judge by them only get fewer."""

from __future__ import annotations

import re

from tests.house.test_layout import PACKAGE, python_files

PATTERNS = 94
"""Regular expressions of the reader and the checks, at most: 96 before names were learnt from the values they hold.
They match the full names of libraries, words of messages, and the user's identifiers; a new one of the last kind needs
labelled examples of two unrelated repositories, and another to go."""
WORDS = 21
"""Lists of names and words, at most: 25 before."""


def test_the_patterns_of_the_reader_and_the_checks_get_fewer() -> None:
    assert _count(r"\bre\.compile\(") <= PATTERNS


def test_the_word_lists_of_the_reader_and_the_checks_get_fewer() -> None:
    assert _count(r"^_?[A-Z_]*(NAMES|WORDS|HINT)[A-Z_]*( *:[^=]*)? = ") <= WORDS


def _count(pattern: str) -> int:
    wanted = re.compile(pattern, re.MULTILINE)
    rooms = (PACKAGE / "source", PACKAGE.parent / "checks")
    files = [path for path in python_files() if any(path.is_relative_to(room) for room in rooms)]
    assert len(files) > 100
    return sum(len(wanted.findall(path.read_text(encoding="utf-8"))) for path in files)
