"""Lines of source files, for excerpts and fingerprints."""

from __future__ import annotations

import io
import tokenize
from functools import lru_cache
from pathlib import Path

MAXIMUM_BYTES = 5_000_000
"""Larger files have no lines here: nobody wrote them."""


def line_of(file: str, line: int) -> str:
    """Return one line (1-based) without its line end; empty when the file or the line cannot be read."""
    lines = _lines(file)
    return lines[line - 1] if 0 < line <= len(lines) else ""


def hold(file: str, content: bytes) -> None:
    """Take the lines of a file from ``content`` from now on: it came from stdin, or is about to be written."""
    _held[file] = content
    _lines.cache_clear()


_held: dict[str, bytes] = {}


@lru_cache(maxsize=64)
def _lines(file: str) -> tuple[str, ...]:
    try:
        if file in _held:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(_held[file]).readline)
            return tuple(_held[file].decode(encoding).replace("\r\n", "\n").replace("\r", "\n").split("\n"))
        if not Path(file).is_file() or Path(file).stat().st_size > MAXIMUM_BYTES:
            return ()
        with tokenize.open(file) as stream:
            return tuple(stream.read().split("\n"))
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
        return ()
