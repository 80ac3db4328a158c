"""Opens what a job, another user or a stranger left: the one way to read runs, dumps, logs, baselines and reports.

Only a regular file is opened: no pipe or socket, which would wait, and no device, which would not end. A file of a
directory that was named is in it: a link that leads out of it is refused. How much is read is bounded by what is read,
not by the size that the system states, for a file may grow and one of ``/proc`` states none.
"""

from __future__ import annotations

import ast
import errno
import io
import os
import stat
import tokenize
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

LONGEST_QUOTE = 200
"""Characters of a file's content that a message repeats."""
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_PIECE_BYTES = 1 << 20


def open_untrusted(path: Path | str, inside: Path | str | None = None) -> int:
    """Return a descriptor for reading; the file lies in the directory ``inside``, wherever links lead.

    What is judged is what is opened: a file that takes its place meanwhile is not. Raises OSError, whose ``strerror``
    is a clause such as ``it is a pipe``.
    """
    held = os.open(path, os.O_PATH | os.O_CLOEXEC)  # opens nothing yet: a pipe does not wait, a tape does not wind
    try:
        kind = stat.S_IFMT(os.fstat(held).st_mode)
        if kind != stat.S_IFREG:
            raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'not a regular file')}", str(path))
        own = f"/proc/self/fd/{held}"
        if inside is not None and not os.readlink(own).startswith(os.path.join(os.path.realpath(inside), "")):
            raise OSError(errno.EINVAL, "it is a link that leads out of its directory", str(path))
        try:
            return os.open(own, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(held)


def read_untrusted(path: Path | str, most_bytes: int, inside: Path | str | None = None) -> bytes:
    """Return the content of a file; raises OSError as ``open_untrusted`` does, and where it holds more."""
    content = read_start(path, most_bytes + 1, inside)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
    return content


def read_start(path: Path | str, most_bytes: int, inside: Path | str | None = None, offset: int = 0) -> bytes:
    """Return so much of a file from ``offset`` on, from so many bytes before its end where that is negative.

    Raises OSError as ``open_untrusted`` does.
    """
    descriptor = open_untrusted(path, inside)
    try:
        at = max(0, os.fstat(descriptor).st_size + offset) if offset < 0 else offset
        pieces, left = [], most_bytes
        while left and (piece := os.pread(descriptor, min(left, _PIECE_BYTES), at)):
            pieces.append(piece)
            at, left = at + len(piece), left - len(piece)
    finally:
        os.close(descriptor)
    return b"".join(pieces)


def quoted(content: object) -> str:
    """Return what a file holds, or what a parser says of it, at the length at which a message may repeat it."""
    text = str(content)
    half = LONGEST_QUOTE // 2
    return text if len(text) <= LONGEST_QUOTE else f"{text[: half - 2]} … {text[1 - half :]}"


def reason_of(error: Exception) -> str:
    """Return why a file could not be read, as a clause."""
    return quoted((isinstance(error, OSError) and error.strerror) or error or type(error).__name__)


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
