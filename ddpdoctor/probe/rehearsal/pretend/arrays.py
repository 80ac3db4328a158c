"""Arrays in binary files that are not on the disk, as ``numpy.memmap`` and ``numpy.fromfile`` read them: tokens."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

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
