"""Names of data that a script lists or reads from a list, where neither the list nor the data are on this machine.

Only a script that ended for lack of them gets these, in another try: many look for a file and go on without it. The
names are the same on every rank; what they name is asked for by them and so is said to be there, and the decoders of
``named_files`` serve it.
"""

from __future__ import annotations

import builtins
import glob
import io
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from ...torch_compat import replaces
from ...user_code import OURS, UserCode
from .absence import OF_NUMBERS, Note

NAMES = 64
"""Enough for several batches on every rank, few enough that a first pass over all of them takes no time."""
_STEM = "pretended"
_NAME = re.compile(_STEM + r"\d{6}")
"""In the path of a pretended file; a directory of the user's may well be called after the stem."""
_LISTS = (".txt", ".lst", ".list")
_KINDS = (
    (".png", re.compile(r"\bImage\.open\b|\bimread\b|\bread_image\b|\bdecode_image\b|\b(pil|default)_loader\b")),
    (".wav", re.compile(r"\bsoundfile\b|\blibrosa\b|\btorchaudio\b|\bwavfile\b")),
)
"""What code does with the files of a directory that it lists."""
_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".wav", ".flac", ".ogg", ".mp3")
"""What ``named_files`` can serve."""
_MAGIC = re.compile(r"[*?\[]")
_FILE = re.compile(rf"[\w./~-]+(?:{'|'.join(map(re.escape, (*OF_NUMBERS, *_ENDINGS)))})\b")
"""In the sentence of a script that has looked for a file."""


class ListedData:
    """Replacements of what lists and looks for files, for the user's code alone."""

    def __init__(self, user_code: UserCode, note: Note, missed: str = "") -> None:
        self._user_code = user_code
        self._note = note
        self._missed = {_kind(file) for file in _FILE.findall(missed)}
        """Directories and endings of the files that the script missed."""

    def install(self) -> None:
        """Serve listings, patterns, lists in text files, and questions whether what they name is there."""
        replaces("listdir", os)(self._listed)
        replaces("glob", glob)(self._matching)
        replaces("glob", pathlib.Path)(self._paths_matching)
        replaces("open", builtins)(self._opened)
        for owner, names in ((os.path, ("exists", "isfile")), (pathlib.Path, ("exists", "is_file"))):
            for name in names:
                replaces(name, owner)(self._there)

    def _listed(self, listdir: Callable[..., Any], path: Any = ".") -> Any:
        try:
            return listdir(path)
        except FileNotFoundError:
            ending = self._kind_of_files()
            if not ending:
                raise
            self._note(f"the files of {path} ({NAMES} {ending} files)")
            return [f"{stem}{ending}" for stem in _stems()]

    def _matching(self, find: Callable[..., Any], pathname: Any, **options: Any) -> Any:
        found = find(pathname, **options)
        if found or not isinstance(pathname, str) or not self._lacks(pathname) or self._user_file() is None:
            return found
        self._note(f"the files that {pathname} matches ({NAMES})")
        directory, last = os.path.split(pathname)
        directory = _MAGIC.sub(_STEM, directory.replace("**", "*"))
        return [os.path.join(directory, f"{stem}{os.path.splitext(last)[1]}") for stem in _stems()]

    def _paths_matching(self, find: Callable[..., Any], path: Any, pattern: Any, **options: Any) -> Any:
        whole = os.path.join(path, pattern)
        return map(type(path), self._matching(lambda name, **_: list(find(path, pattern, **options)), whole))

    def _lacks(self, pattern: str) -> bool:
        """Return whether the place of a pattern is absent, and what it would match can be served."""
        place = os.path.dirname(_MAGIC.split(pattern)[0])
        return pattern.lower().endswith(_ENDINGS) and bool(place) and not os.path.exists(place)

    def _opened(self, opened: Callable[..., Any], file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        try:
            return opened(file, mode, *arguments, **options)
        except FileNotFoundError:
            name = os.fspath(file) if isinstance(file, (str, os.PathLike)) else ""
            reads = isinstance(mode, str) and set(mode) <= set("rt")
            if not reads or not str(name).endswith(_LISTS) or self._user_file() is None:
                raise
            self._note(f"{name} ({NAMES} names)")
            return io.StringIO("".join(f"{stem}\n" for stem in _stems()))

    def _there(self, is_there: Callable[..., bool], path: Any, **options: Any) -> bool:
        if is_there(path, **options) or not isinstance(path, (str, os.PathLike)):
            return is_there(path, **options)
        name = str(path)
        return _NAME.search(name) is not None or (_kind(name) in self._missed and self._user_file() is not None)

    def _kind_of_files(self) -> str:
        """Return the ending that fits what the code that lists a directory reads; empty where it reads neither."""
        file = self._user_file()
        if file is None:
            return ""
        with open(file, encoding="utf-8", errors="replace") as source:
            text = source.read()
        return next((ending for ending, words in _KINDS if words.search(text)), "")

    def _user_file(self) -> str | None:
        """Return the file of the user's code that asks; None where a library asks for itself."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if not file.startswith(OURS) and not self._user_code.is_standard_library(file):
                return file if self._user_code.holds(file) else None
            frame = frame.f_back
        return None


def _kind(file: str) -> tuple[str, str]:
    return os.path.dirname(os.path.abspath(os.path.expanduser(file))), os.path.splitext(file)[1]


def _stems() -> Iterator[str]:
    return (f"{_STEM}{index:06d}" for index in range(NAMES))
