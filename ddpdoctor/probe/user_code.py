"""Finds the user's lines on a stack: what is neither the standard library, nor installed, nor ours."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from types import FrameType
from typing import Optional

FrameTuple = tuple[str, int, str]
"""File, line, function."""

_MOST_FRAMES = 16
_INSTALLED = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)


class UserCode:
    """Knows which files are the user's; remembers what it found out about each."""

    def __init__(self, project_root: str) -> None:
        ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        paths = sysconfig.get_paths()
        libraries = {os.path.realpath(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
        self._ours = os.path.realpath(ours) + os.sep
        self._libraries = tuple(path + os.sep for path in sorted(libraries))
        self._root = os.path.realpath(project_root) + os.sep if project_root else ""
        self._known: dict[str, bool] = {}

    def holds(self, filename: str) -> bool:
        """Tell whether the file is the user's."""
        known = self._known.get(filename)
        if known is None:
            known = self._known[filename] = self._look(filename)
        return known

    def frames(self, frame: Optional[FrameType]) -> tuple[FrameTuple, ...]:
        """The user's lines from ``frame`` outwards, innermost first."""
        found: list[FrameTuple] = []
        while frame is not None and len(found) < _MOST_FRAMES:
            code = frame.f_code
            if self.holds(code.co_filename):
                found.append((os.path.abspath(code.co_filename), frame.f_lineno or 0, name_of(frame)))
            frame = frame.f_back
        return tuple(found)

    def frames_here(self, frame: Optional[FrameType]) -> tuple[FrameTuple, ...]:
        """The user's lines of this thread or, where it has none (an autograd thread), of the main thread."""
        found = self.frames(frame)
        if not found and threading.current_thread() is not threading.main_thread():
            main = sys._current_frames().get(threading.main_thread().ident or 0)
            found = self.frames(main)
        return found

    def _look(self, filename: str) -> bool:
        if not filename or filename.startswith("<"):
            return False
        path = os.path.realpath(filename)
        if path.startswith(self._ours):
            return False
        if self._root and path.startswith(self._root):
            return not any(part in path[len(self._root) - 1 :] for part in _INSTALLED)
        if any(part in path for part in _INSTALLED):
            return False
        return not path.startswith(self._libraries)


def name_of(frame: FrameType) -> str:
    """Qualified name of a frame's function, where this Python knows it."""
    return str(getattr(frame.f_code, "co_qualname", frame.f_code.co_name))


def all_frames(frame: Optional[FrameType]) -> list[FrameTuple]:
    """Every line of a stack, innermost first."""
    found: list[FrameTuple] = []
    while frame is not None and len(found) < 64:
        found.append((frame.f_code.co_filename, frame.f_lineno or 0, name_of(frame)))
        frame = frame.f_back
    return found
