"""What a comparison of the ranks with one process says: the data that checks read and reports render."""

from __future__ import annotations

from typing import Literal

import msgspec

COUNTED_TWICE = (
    "Multiply the loss by the world size, `loss = total * world_size / count`: the mean over the ranks divides by it"
    " once more."
)
"""The remedy of a loss that is divided by a count of all ranks and averaged over the ranks on top."""

OWN_GRADIENTS = "each rank steps with a gradient"
"""How it is said that gradients are not averaged, which other checks of a run say with the reason."""


class EquivalenceSection(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the ranks train what one process would on the same samples."""

    status: Literal["equal", "differs", "inconclusive"]
    kind: str = ""
    """How the gradients differ: ``scaled``, ``part``, ``weighted``, ``one-rank``, ``rank-constant``, ``cut``,
    ``clipped``, ``own-factors``, ``unsynchronised``; compared with another launch also ``other``."""
    reason: str = ""
    """Why it could not be told, as a clause."""
    ranks: int = 0
    steps: int = 0
    """Optimizer steps that were compared."""
    parameters: int = 0
    equal: int = 0
    """Parameters with the same gradient."""
    within: float = 0.0
    """The largest difference of a parameter's gradient, as a share of its norm."""
    zero: bool = False
    """All gradients are zero, on the ranks and in one process."""
    factor: float | None = None
    """The ranks' gradient as a multiple of the one process's."""
    modules: tuple[str, ...] = ()
    """Those that differ; empty for all."""
    at: tuple[int, ...] = ()
    """Ranks whose loss is another one."""
    weights: tuple[float, ...] = ()
    """The shares that the ranks' samples have in the gradient, by rank, …"""
    due: tuple[float, ...] = ()
    """… and those that they have in one process."""
    by_rank: tuple[float, ...] = ()
    """The gradient of the part that each rank holds as a multiple of the one process's."""
    counts: tuple[int, ...] = ()
    """Targets that each rank counts, where its share in one process is theirs."""
    places: tuple[tuple[str, str, int], ...] = ()
    """What is called where: name, file and line; of equal gradients, divisors that are counts of all ranks."""
    statistics_by_rank: bool = False
    """Batch norms take the statistics of each rank's samples, and did so in one process as well."""
    in_turn: bool = False
    """One process was given the batches of the ranks one after the other, as it asked for more of them."""
    against: str = ""
    """The command of the other launch, where one was compared with in place of one process."""
    norms: tuple[float, ...] = ()
    """Of all gradients in the first step, by the ranks and by what they are compared with."""
    factors: tuple[tuple[str, float], ...] = ()
    """Parameters whose gradients differ in the first step, the most different first, and how many times as long
    as the other one the ranks' gradient is in its direction."""
    share: float = 1.0
    """Of the elements of the gradients that were compared."""
    beside: tuple[str, ...] = ()
    """Buffers, and states of the optimizer, that differ after a first step of equal gradients."""
    unclipped: bool = False
    """They are compared as they were before the script clips them."""
    seconds: float = 0.0
