"""Whether something is missing on the disk or wrong, decided without the network; arrays that stand for it."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, Final

# Arrays in binary files that are not on the disk, as `numpy.memmap` and `numpy.fromfile` read them: tokens.

ITEMS = 1 << 20
"""Of a stream of unknown length: enough for some hundred batches of 1,024 tokens."""
LARGEST = 64
"""Values are below it, so that the smallest vocabulary (characters of a text, 65) has them all."""
_ENDINGS = (".bin", ".dat", ".npy", ".raw", ".idx", ".tokens", ".mmap")


def serve_numpy(numpy: Any, note: Callable[[str], None], directory: str) -> None:
    """Let ``memmap`` and ``fromfile`` read a generated file where a binary file that they read is missing."""

    def stand_in(path: Any, dtype: Any, shape: Any) -> str:
        items = int(numpy.prod(shape)) if shape is not None else ITEMS
        made = os.path.join(directory, f"pretended-{os.getpid()}-{numpy.dtype(dtype).name}-{items}.bin")
        if not os.path.exists(made):
            numbers = numpy.random.Generator(numpy.random.PCG64(0)).integers(0, LARGEST, items)
            numbers.astype(dtype).tofile(made)
        note(f"{os.path.basename(os.fspath(path))} (an array of numbers)")
        return made

    create = numpy.memmap.__new__

    @functools.wraps(create)
    def __new__(
        cls: Any,
        filename: Any,
        dtype: Any = "uint8",
        mode: Any = "r+",
        offset: int = 0,
        shape: Any = None,
        order: Any = "C",
    ) -> Any:
        if mode in ("r", "c", "readonly", "copyonwrite") and _is_absent(filename):
            filename, offset = stand_in(filename, dtype, shape), 0
        return create(cls, filename, dtype, mode, offset, shape, order)

    numpy.memmap.__new__ = staticmethod(__new__)
    read = numpy.fromfile

    @functools.wraps(read)
    def fromfile(file: Any, dtype: Any = float, count: int = -1, *arguments: Any, **options: Any) -> Any:
        if _is_absent(file):
            file = stand_in(file, dtype, None if count < 0 else count)
        return read(file, dtype, count, *arguments, **options)

    numpy.fromfile = fromfile


def _is_absent(path: Any) -> bool:
    """Return whether a binary file is named that is not there."""
    if not isinstance(path, (str, os.PathLike)):
        return False
    name = os.fspath(path)
    return isinstance(name, str) and name.endswith(_ENDINGS) and not os.path.exists(name)


Note = Callable[[str], None]
"""Takes what was pretended, in the words of the user."""
ABSENT: Final = object()
"""What ``on_this_machine`` returns for what is not there."""
_SWITCHES = (
    ("huggingface_hub.constants", "HF_HUB_OFFLINE"),
    ("datasets.config", "HF_HUB_OFFLINE"),
    ("datasets.config", "HF_DATASETS_OFFLINE"),
    ("transformers.utils.hub", "_is_offline_mode"),
)
"""What keeps the libraries of Hugging Face to the disk, where they have it."""
_ABSENCES = frozenset(
    {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "URLError", "FileNotFoundError", "DatasetNotFoundError"}
)
_TEXTS = ("huggingface.co", "no file named", "appear to have a file named", "on the Hub", "the backend tokenizer from")
"""What messages of transformers or datasets hold about what is not there, in an OSError or a ValueError."""


class OffTheNetwork:
    """A context that keeps the Hugging Face hub to what is on the disk."""

    def __enter__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []
        for module, name in _SWITCHES:
            holder = sys.modules.get(module)
            if holder is not None and hasattr(holder, name):
                self._before.append((holder, name, getattr(holder, name)))
                setattr(holder, name, True)

    def __exit__(self, *exception: Any) -> None:
        for holder, name, value in self._before:
            setattr(holder, name, value)


def on_this_machine(load: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call ``load`` without the network; return ``ABSENT`` where its object is not on the disk; raise the rest."""
    try:
        with OffTheNetwork():
            return load(*arguments, **options)
    except Exception as error:
        if not is_absence(error):
            raise
        return ABSENT


def is_absence(error: BaseException) -> bool:
    """Return whether an exception, or its cause, means that something is not on the disk and may not be fetched."""
    seen: Any = error
    while seen is not None:
        if {one.__name__ for one in type(seen).__mro__} & _ABSENCES:
            return True
        text = str(seen)
        if isinstance(seen, (OSError, ValueError)) and any(words in text for words in _TEXTS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def short_name(path: Any) -> str:
    """Return the last name of a path or of a repository."""
    return os.path.basename(str(path).rstrip("/")) or str(path)
