"""Collectives that the user called on the wrong tensor or the wrong group."""

from __future__ import annotations

import msgspec


class ReducedLoss(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that the user's collective changed in place and that a backward then started from or came through."""

    rank: int
    site: int = -1
    """Of the collective."""
    backward_site: int = -1


class OutsiderCall(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that a rank called on a group which it is no member of; torch does nothing then."""

    rank: int
    operation: str
    site: int = -1
