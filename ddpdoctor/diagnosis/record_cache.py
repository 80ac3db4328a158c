"""Lets what follows from a record be computed once for all who ask for it."""

from __future__ import annotations

from ddpdoctor.record.model import RunRecord


class ByIdentity:
    """A record as the key of a cache: equal to itself only, so that nothing in it is compared."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.record is self.record

    def __hash__(self) -> int:
        return id(self.record)
