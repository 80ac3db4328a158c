"""Lets what follows from a record be computed once for all who ask for it."""

from __future__ import annotations

from typing import Generic, TypeVar

Held = TypeVar("Held")


class ByIdentity(Generic[Held]):
    """A record, or a part of one, as the key of a cache: equal to itself only, so that nothing in it is compared."""

    def __init__(self, of: Held) -> None:
        self.of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.of is self.of

    def __hash__(self) -> int:
        return id(self.of)
