"""The four ranks that a script is read for: two nodes of two, or one of four when the script spawns them itself."""

from __future__ import annotations

from ddpdoctor.source.interpreter.values import RANKS, Const, Lanes

GLOBAL_RANK = (0, 1, 2, 3)
LOCAL_RANK = (0, 1, 0, 1)
NODE_RANK = (0, 0, 1, 1)
FIRST = (True, False, False, False)


def exact_lanes(values: tuple[object, ...]) -> Lanes:
    """A value whose variation is known from its origin."""
    return Lanes(tuple(Const(value) for value in values))


def guessed_lanes(values: tuple[object, ...]) -> Lanes:
    """A value whose variation is read from a name."""
    return Lanes(tuple(Const(value) for value in values), guessed=True)


def numbers_in(mask: int) -> tuple[int, ...]:
    """The ranks of a mask, ascending."""
    return tuple(rank for rank in RANKS if mask >> rank & 1)


def spoken(mask: int) -> str:
    """``rank 0``, ``ranks 1-3``, ``ranks 0 and 2``."""
    ranks = numbers_in(mask)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ", ".join(str(rank) for rank in ranks[:-1]) + f" and {ranks[-1]}"
