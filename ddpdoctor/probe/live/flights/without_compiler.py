"""Keeps torch's flight recorder from importing torch's compiler in our thread.

For the frames of compiled code the recorder looks for ``torch._inductor.codecache``, and ``torch`` imports its compiler
when that name is read: seconds of work, in which our thread takes the locks of imports and of logging. A training
thread that imports at the same moment gets a half-made module; one that forks, for the workers of a loader, holds the
lock of logging while it waits for that of imports, so that the two deadlock (torch 2.13, at a load of 18 on two cores).
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NAME = "_inductor"


@contextmanager
def without_compiler(torch: Any) -> Iterator[None]:
    """Make ``torch._inductor`` empty for this thread, unless it was imported before; for others it is as ever."""
    names = vars(torch)
    empty = _Empty(f"{torch.__name__}.{_NAME}", threading.get_ident())
    if names.setdefault(_NAME, empty) is not empty:
        yield
        return
    try:
        yield
    finally:
        # What was imported meanwhile has taken its place, and stays.
        if names.get(_NAME) is empty:
            del names[_NAME]


class _Empty:
    """A module that has nothing for one thread; for every other one it is the module of that name."""

    def __init__(self, name: str, thread: int) -> None:
        self.__dict__.update(_Empty__name=name, _Empty__thread=thread)

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self.__thread:
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(importlib.import_module(self.__name), name, value)
