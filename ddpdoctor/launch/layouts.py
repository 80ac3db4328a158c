"""Layouts of a job over nodes, which a rehearsal pretends on one machine."""

from __future__ import annotations

import re

import msgspec

from ddpdoctor.errors import UsageError

_SHAPE = re.compile(r"(\d{1,3})x(\d{1,3})")
FEWEST_RANKS = 2
"""With one rank there is nothing to compare."""
MOST_RANKS = 64


class Layout(msgspec.Struct, frozen=True):
    """So many nodes with so many ranks each."""

    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.ranks_per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}"


def parse_layout(text: str) -> Layout:
    """Read ``NODESxRANKS``; raises UsageError for what is none, and for too few or too many ranks."""
    match = _SHAPE.fullmatch(text.strip().lower())
    if match is None or not int(match[1]) * int(match[2]):
        raise UsageError(
            f"`{text}` is not a layout", "Write NODESxRANKS, such as 2x1 for two nodes with one rank each."
        )
    layout = Layout(int(match[1]), int(match[2]))
    if not FEWEST_RANKS <= layout.ranks <= MOST_RANKS:
        raise UsageError(
            f"the layout {layout} has {layout.ranks} rank{'' if layout.ranks == 1 else 's'}; a rehearsal runs "
            f"{FEWEST_RANKS} to {MOST_RANKS}"
        )
    return layout
