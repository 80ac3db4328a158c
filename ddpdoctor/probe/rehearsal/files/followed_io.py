"""File objects that record what they write, in the place of Python's own, for files that are opened for writing."""

from __future__ import annotations

import builtins
import functools
import io
import os
import sys
from collections.abc import Callable
from typing import Any, Optional

from .open_files import OpenFiles, Written, take_place

_WRITING = frozenset("wax+")
_KNOWN = frozenset("rwaxbt+")


class Followed(io.FileIO):
    """A file that is open for writing, as ``io.FileIO`` is, with an account of what is written to it."""

    _account: Optional[Written] = None
    _quietly: Callable[[Callable[[], Any]], Any]

    def write(self, data: Any, /) -> int:
        """Write, after a test that no other program has written since."""
        return int(self._seen(lambda: io.FileIO.write(self, data)) or 0)

    def truncate(self, size: Optional[int] = None, /) -> int:
        """Change the size."""
        return int(self._seen(lambda: io.FileIO.truncate(self, size)))

    def fileno(self) -> int:
        """Return the descriptor, through which may be written from now on."""
        if self._account is not None:
            self._account.unseen()
        return super().fileno()

    def close(self) -> None:
        """Close the file, in the state in which it is left."""
        account, self._account = self._account, None
        if account is not None and not self.closed:
            self._guarded(lambda: account.closing(io.FileIO.fileno(self)))
        super().close()

    def _seen(self, change: Callable[[], Any]) -> Any:
        account = self._account
        if account is None:
            return change()
        self._guarded(lambda: account.before(io.FileIO.fileno(self)))
        try:
            return change()
        finally:
            self._guarded(lambda: account.after(os.fstat(io.FileIO.fileno(self))))

    def _guarded(self, call: Callable[[], Any]) -> None:
        try:
            self._quietly(call)
        except Exception:
            # What is not recorded stays where it is; the user's file is written regardless.
            return


Followed.__name__ = Followed.__qualname__ = "FileIO"


def follow_io(files: Callable[[], OpenFiles], quietly: Callable[[Callable[[], Any]], Any]) -> None:
    """Take the places of ``open``, ``io.open``, and of ``os.open`` and ``os.close``; ``files`` gives the accounts."""
    original = builtins.open
    followed = type("FileIO", (Followed,), {"_quietly": staticmethod(quietly), "__slots__": ()})

    def open(  # noqa: A001 - takes the place of the builtin
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: Optional[str] = None,
        errors: Optional[str] = None,
        newline: Optional[str] = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """Open a file."""
        plain = not isinstance(mode, str) or _WRITING.isdisjoint(mode) or not _is_valid(mode, buffering)
        if plain or ("b" in mode and (encoding, errors, newline) != (None, None, None)):
            return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = followed(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        try:
            raw._account = _begun(files(), raw, quietly)
            return _buffered(raw, mode, buffering, encoding, errors, newline)
        except BaseException:
            raw.close()
            raise

    open.__module__, open.__qualname__ = "_io", "open"
    open.__doc__ = original.__doc__
    for owner in (builtins, io, sys.modules["_io"]):
        if getattr(owner, "open", None) is original:
            setattr(owner, "open", open)  # noqa: B010 - mypy holds a function of a module for final
    _follow_descriptors(files, quietly)


def _begun(files: OpenFiles, raw: Followed, quietly: Callable[[Callable[[], Any]], Any]) -> Optional[Written]:
    try:
        account: Optional[Written] = quietly(lambda: files.begin(io.FileIO.fileno(raw)))
    except Exception:
        return None
    return account


def _is_valid(mode: str, buffering: object) -> bool:
    """Return whether a mode is one that needs no error or warning of Python's own ``open``."""
    letters = set(mode)
    if not letters <= _KNOWN or len(letters) != len(mode) or len(letters & set("rwax")) != 1 or {"b", "t"} <= letters:
        return False
    return isinstance(buffering, int) and (buffering < 0 or buffering > 1 or (buffering == 0) == ("b" in letters))


def _buffered(
    raw: Followed, mode: str, buffering: int, encoding: Optional[str], errors: Optional[str], newline: Optional[str]
) -> Any:
    """Build what Python's own ``open`` builds around a file."""
    lines = buffering == 1 or (buffering < 0 and raw.isatty())
    if buffering == 0:
        return raw
    if buffering < 0 or buffering == 1:
        blksize = int(getattr(raw, "_blksize", 0))
        buffering = blksize if blksize > 1 else io.DEFAULT_BUFFER_SIZE
    buffer = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw, buffering)
    if "b" in mode:
        return buffer
    if encoding is None and hasattr(io, "text_encoding"):
        encoding = io.text_encoding(encoding, 3)
    text = io.TextIOWrapper(buffer, encoding, errors, newline, lines)
    setattr(text, "mode", mode)  # noqa: B010 - as Python's own does, though its stub has it read-only
    return text


def _follow_descriptors(files: Callable[[], OpenFiles], quietly: Callable[[Callable[[], Any]], Any]) -> None:
    opened, closed = os.open, os.close

    def open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: Optional[int] = None) -> int:  # noqa: A001
        """Open a file by a descriptor."""
        descriptor = opened(path, flags, mode, dir_fd=dir_fd)
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            try:
                quietly(lambda: files().opened(descriptor, flags))
            except Exception:
                return descriptor
        return descriptor

    def close(fd: int) -> None:
        """Close a descriptor."""
        try:
            quietly(lambda: files().closing(fd))
        except Exception:
            pass
        closed(fd)

    take_place("open", functools.wraps(opened)(open))
    take_place("close", functools.wraps(closed)(close))
