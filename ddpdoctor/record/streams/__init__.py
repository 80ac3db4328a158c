"""What the streams of a record consist of."""

from __future__ import annotations

import msgspec


class RowOfRank(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one rank."""

    rank: int


class RowAtLine(RowOfRank, frozen=True, kw_only=True):
    """What it did or had at a line of the user's."""

    site: int = -1
    """Index into ``RunRecord.sites``; -1 where no line is known."""


class RowAtTime(RowAtLine, frozen=True, kw_only=True):
    """The same at a known moment."""

    time_ns: int = 0
    """Since the epoch."""
