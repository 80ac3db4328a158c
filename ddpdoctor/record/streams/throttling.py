"""The driver's reasons for running a GPU below its highest clock, in words."""

from __future__ import annotations

POWER_BRAKE = "power brake by the power supply"
TOO_HOT = "too hot"
HARDWARE_SLOWDOWN = "slowed down by the hardware"
POWER_LIMIT = "at its power limit"
CLOCKS_SET = "clocks set by an administrator"
SYNC_BOOST = "held at the clock of a slower GPU"
BOARD_LIMIT = "at a limit of the board"

HARMFUL = frozenset({POWER_BRAKE, TOO_HOT, HARDWARE_SLOWDOWN})
"""No healthy GPU runs so for long; a power limit is reached by any GPU that multiplies large matrices."""

_BITS = (
    (0x80, POWER_BRAKE),
    (0x40 | 0x20, TOO_HOT),
    (0x08, HARDWARE_SLOWDOWN),
    (0x04, POWER_LIMIT),
    (0x200 | 0x400, BOARD_LIMIT),
    (0x10, SYNC_BOOST),
    (0x02 | 0x100, CLOCKS_SET),
)
"""Bits of ``nvmlClocksEventReasons``, worst first; bit 0 says that the GPU idles, which is no throttling."""


def reasons_in_words(bits: int) -> tuple[str, ...]:
    """Return the reasons that are set, worst first.

    The hardware's slowdown is also set when it is too hot or braked by the power supply, and then says nothing more.
    """
    found = [words for mask, words in _BITS if bits & mask]
    if found and found[0] in (POWER_BRAKE, TOO_HOT):
        found = [words for words in found if words != HARDWARE_SLOWDOWN]
    return tuple(found)
