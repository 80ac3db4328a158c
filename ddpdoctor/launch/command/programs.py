"""Finds the Python that a program of a launch command belongs to."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from ddpdoctor.errors import UsageError

_LONGEST_FIRST_LINE = 512


def named_by_path(word: str) -> bool:
    """Return whether the user wrote where a program is, and not only what it is called."""
    return os.sep in word


def program_of(word: str, environment: Mapping[str, str]) -> str:
    """Absolute path of a program; empty when only its name is given and no such program is on the PATH.

    Raises UsageError for a path at which there is no program.
    """
    found = shutil.which(word, path=environment.get("PATH", os.defpath))
    if found is None and named_by_path(word):
        raise UsageError(f"{word}: no such program")
    return os.path.abspath(found) if found is not None else ""


def python_of(word: str, environment: Mapping[str, str]) -> str:
    """Return the Python that runs a launcher: its first line names it, or it lies beside it; empty when it is not
    known.

    Raises UsageError for a path at which there is no program.
    """
    program = program_of(word, environment)
    if not program:
        return ""
    if os.path.basename(program).startswith("python"):
        return program
    interpreter = _interpreter_of(program)
    if interpreter:
        return interpreter
    beside = Path(program).with_name("python")
    return str(beside) if os.access(beside, os.X_OK) else ""


def is_python_script(word: str, environment: Mapping[str, str]) -> bool:
    """Return whether a file that is named by its path is run by Python: its first line says so."""
    path = Path(word)
    return named_by_path(word) and path.is_file() and "python" in _first_line(path)


def _interpreter_of(program: str) -> str:
    words = shlex.split(_first_line(Path(program)).removeprefix("#!"))
    if words and os.path.basename(words[0]).startswith("python") and os.access(words[0], os.X_OK):
        return words[0]
    return ""


def _first_line(path: Path) -> str:
    """Return the line that says which program runs a file; empty when it has none."""
    try:
        with path.open("rb") as file:
            line = file.readline(_LONGEST_FIRST_LINE)
    except OSError:
        return ""
    return line.decode("utf-8", "replace").strip() if line.startswith(b"#!") else ""
