"""Lines of source files, for excerpts and fingerprints."""

from __future__ import annotations

import ast
import errno
import io
import tokenize
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from ddpdoctor.files.untrusted import read_untrusted

MAXIMUM_BYTES = 5_000_000
"""Larger files have no lines here: no one wrote them."""
_OF_PYTHON = frozenset({".py", ".pyw", ".pyi", ".pyx"})


def decoded(raw: bytes) -> tuple[str, str]:
    """Return the text of a Python file and its encoding, as its first bytes or lines say.

    Raises SyntaxError for an encoding that there is not, or that is none of text (rot13, hex), and ValueError for
    content that is not in it.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    except SyntaxError:
        raw.decode("utf-8")
        raise
    try:
        return raw.decode(encoding), encoding
    except LookupError as error:
        raise SyntaxError(f"{encoding} is not a text encoding") from error


def line_of(file: str, line: int) -> str:
    """Return one line (1-based) without its line end; empty when the file or the line cannot be read."""
    if _finders:
        return _finders[-1](file, line)
    lines = _lines(file)
    return lines[line - 1] if 0 < line <= len(lines) else ""


def source_of(file: str) -> str:
    """Return the text of a Python file: a record may name any file, and no other may be shown because of that.

    Raises OSError for one that is no such file, SyntaxError and ValueError as ``decoded`` does.
    """
    if file in _held:
        return decoded(_held[file])[0]
    raw = read_untrusted(file, MAXIMUM_BYTES)
    first = raw[:200].partition(b"\n")[0]
    if Path(file).suffix not in _OF_PYTHON and not (first.startswith(b"#!") and b"python" in first):
        raise OSError(errno.EINVAL, "it is no Python file", file)
    return decoded(raw)[0]


def tree_of(file: str) -> ast.Module | None:
    """Return the syntax of a file as it is on the disk; None where it cannot be read or has none."""
    try:
        return ast.parse(read_untrusted(file, MAXIMUM_BYTES))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def hold(file: str, content: bytes) -> None:
    """Take the lines of a file from ``content`` from now on: it came from stdin, or is about to be written."""
    _held[file] = content
    _lines.cache_clear()


@contextmanager
def lines_by(find: Callable[[str, int], str]) -> Iterator[None]:
    """Have every line found like this meanwhile, and none in a file: those that are meant are another machine's."""
    _finders.append(find)
    try:
        yield
    finally:
        _finders.remove(find)


_held: dict[str, bytes] = {}
_finders: list[Callable[[str, int], str]] = []


@lru_cache(maxsize=64)
def _lines(file: str) -> tuple[str, ...]:
    try:
        text = source_of(file)
        return tuple(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    except (OSError, SyntaxError, ValueError):
        return ()
