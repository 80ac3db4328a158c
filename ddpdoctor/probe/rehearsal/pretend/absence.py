"""Whether something is missing on the disk or wrong, decided without the network; arrays that stand for it."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from ...torch_compat import replaces

# Arrays in binary files that are not on the disk, as `numpy.memmap`, `fromfile` and `load` read them: tokens.

ITEMS = 1 << 20
"""Of a stream of unknown length: enough for some hundred batches of 1,024 tokens."""
LARGEST = 64
"""Values are below it, so that the smallest vocabulary (characters of a text, 65) has them all."""
OF_NUMBERS = (".bin", ".dat", ".npy", ".raw", ".idx", ".tokens", ".mmap")


def serve_numpy(numpy: Any, note: Callable[[str], None], directory: str) -> None:
    """Let ``memmap`` and ``fromfile`` read a generated file where a binary file that they read is missing."""
    stand_in = functools.partial(_array_file, numpy, note, directory)

    @replaces("__new__", numpy.memmap)
    def __new__(
        create: Any,
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

    @replaces("fromfile", numpy)
    def fromfile(read: Any, file: Any, dtype: Any = float, count: int = -1, *arguments: Any, **options: Any) -> Any:
        if _is_absent(file):
            file = stand_in(file, dtype, None if count < 0 else count)
        return read(file, dtype, count, *arguments, **options)


def serve_arrays(numpy: Any, note: Callable[[str], None], directory: str) -> None:
    """Let ``load`` read one, too: tokens, where nothing says what else."""

    @replaces("load", numpy)
    def load_or_pretend(load: Any, file: Any, *arguments: Any, **options: Any) -> Any:
        if _is_absent(file):
            return numpy.fromfile(file, numpy.uint16)
        return load(file, *arguments, **options)


def _array_file(numpy: Any, note: Callable[[str], None], directory: str, path: Any, dtype: Any, shape: Any) -> str:
    """Make a file of numbers and return its name."""
    items = int(numpy.prod(shape)) if shape is not None else ITEMS
    made = os.path.join(directory, f"pretended-{os.getpid()}-{numpy.dtype(dtype).name}-{items}.bin")
    if not os.path.exists(made):
        numbers = numpy.random.Generator(numpy.random.PCG64(0)).integers(0, LARGEST, items)
        numbers.astype(dtype).tofile(made)
    note(f"{os.path.basename(os.fspath(path))} (an array of numbers)")
    return made


def _is_absent(path: Any) -> bool:
    """Return whether a binary file is named that is not there."""
    if not isinstance(path, (str, os.PathLike)):
        return False
    name = os.fspath(path)
    return isinstance(name, str) and name.endswith(OF_NUMBERS) and not os.path.lexists(name)


class Labels:
    """What generated samples are labelled with: as many classes as the data set has, or what any model has."""

    FEWEST = 2
    are_few = False
    """An earlier try ended because the model has fewer classes than the data set whose place was taken."""

    @classmethod
    def below(cls, classes: int) -> int:
        """Return the number that labels are below where a data set has so many classes."""
        return min(classes, cls.FEWEST) if cls.are_few else classes


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
