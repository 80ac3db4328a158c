"""What was set on a data set after workers that are kept have copied it, and their copies are read for."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any

_METHODS = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__")
"""What makes items; other methods are followed from there."""
_PLAIN = (bool, int, float, str, type(None))
MOST_OBJECTS = 50


class Copies:
    """What the data set of each loader that keeps its workers held when these were started."""

    def __init__(self) -> None:
        self._held: dict[int, dict[tuple[int, str], object]] = {}
        """By the number of the loader: by object and attribute the value, or the identity, of what is there."""

    def changed(self, loader: Any, number: int) -> list[str]:
        """Return the attributes that items are made with and that the workers of a loader have otherwise."""
        if not loader.num_workers or not loader.persistent_workers:
            return []
        objects = list(_objects(loader.dataset))
        now = {(id(one), name): _kept(value) for one in objects for name, value in vars(one).items()}
        before = self._held.setdefault(number, now)
        if before is now:
            return []
        read = {name for one in objects for name in _read(type(one))}
        changed = {name for (one, name), value in now.items() if before.get((one, name), value) != value}
        return sorted(changed & read)


def _objects(dataset: Any) -> Iterator[Any]:
    """Yield a data set and what it holds, as far as that has attributes."""
    pending, seen = [dataset], set[int]()
    while pending and len(seen) < MOST_OBJECTS:
        one = pending.pop(0)
        if id(one) in seen or not hasattr(one, "__dict__") or isinstance(one, type):
            continue
        seen.add(id(one))
        yield one
        for value in vars(one).values():
            pending.extend(value if isinstance(value, (list, tuple)) and len(value) <= MOST_OBJECTS else (value,))


def _kept(value: Any) -> object:
    return value if isinstance(value, _PLAIN) else ("object", id(value))


def _read(cls: type) -> set[str]:
    """Return the names that the methods which make items read, with those of what they call in their class."""
    found: set[str] = set()
    pending = [name for name in _METHODS if hasattr(cls, name)]
    followed: set[str] = set()
    while pending:
        name = pending.pop()
        followed.add(name)
        method = getattr(cls, name, None)
        code = getattr(getattr(method, "fget", method), "__code__", None)
        if code is not None:
            names = set(_names(code))
            found |= names
            pending.extend(one for one in names if one not in followed and hasattr(cls, one))
    return found


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
