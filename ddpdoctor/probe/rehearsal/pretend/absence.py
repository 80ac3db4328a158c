"""Whether something is missing on the disk or wrong, decided without a query of the network."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Final

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
