"""The variables of the rank projection, with a journal so that the arms of a branch can be tried in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpdoctor.source.interpreter.values import ALL_LANES, RANKS, Value, join, lane, lanes_of

Cell = tuple[int, str]
"""A scope or an object by its number, and a name in it."""


NEVER = 1 << 60
"""Larger than any number of a scope."""


class Store:
    """Values by scope and name."""

    def __init__(self) -> None:
        self.owners: dict[int, dict[str, Value | None]] = {}
        """By scope or object its names in the order of their first assignment; None for one that was taken back."""
        self._journals: list[dict[Cell, Value | None]] = []
        self.oldest_written = NEVER
        """Smallest number of a scope or object that was written since somebody set this to ``NEVER``."""

    def get(self, owner: int, name: str) -> Value | None:
        """The value of a name, None when it has none."""
        names = self.owners.get(owner)
        return None if names is None else names.get(name)

    def set(self, owner: int, name: str, value: Value, ranks: int = ALL_LANES) -> None:
        """Give a name a value on the ranks of a mask; the others keep theirs."""
        if ranks != ALL_LANES:
            old = self.get(owner, name)
            if old is not None and old != value:
                value = lanes_of([lane(value if ranks >> rank & 1 else old, rank) for rank in RANKS])
        self.write((owner, name), value)

    def names(self, owner: int) -> tuple[str, ...]:
        """The names in a scope or of an object's attributes, in the order of their first assignment."""
        return tuple(self.owners.get(owner, ()))

    @property
    def depth(self) -> int:
        """How many journals are open."""
        return len(self._journals)

    def begin(self) -> None:
        """Start a journal."""
        self._journals.append({})

    def undo(self) -> dict[Cell, Value]:
        """Take back everything written since ``begin``; return what was written."""
        journal, owners = self._journals.pop(), self.owners
        written: dict[Cell, Value] = {}
        for cell, old in journal.items():
            names = owners[cell[0]]
            value = names[cell[1]]
            if value is not None:
                written[cell] = value
            names[cell[1]] = old
        return written

    def latest(self) -> Mapping[Cell, Value | None]:
        """What the cells held before that were written since the last ``begin``."""
        return self._journals[-1]

    def keep(self) -> None:
        """End a journal without taking anything back."""
        journal = self._journals.pop()
        if self._journals:
            outer = self._journals[-1]
            for cell, old in journal.items():
                outer.setdefault(cell, old)

    def put(self, written: Mapping[Cell, Value]) -> None:
        """Write values that were taken back."""
        for cell, value in written.items():
            self.write(cell, value)

    def merge(self, written: Mapping[Cell, Value], varying: bool = False) -> None:
        """Join values that a path left behind with the present ones."""
        for cell, value in written.items():
            self.write(cell, join(self.get(*cell), value, varying))

    def merge_arms(self, arms: Sequence[tuple[Mapping[Cell, Value], int]], varying: bool) -> None:
        """Join what alternative paths wrote; each comes with the mask of the ranks that reached its end."""
        if len(arms) == 1:
            self.put(arms[0][0])
            return
        cells: dict[Cell, None] = {}
        for written, _ in arms:
            cells.update(dict.fromkeys(written))
        if not cells:
            return
        alike = len({ranks for _, ranks in arms}) == 1
        for cell in cells:
            base = self.get(*cell)
            if alike:
                value = self._joined([written.get(cell, base) for written, _ in arms], varying)
            else:
                value = lanes_of([self._joined_lane(cell, base, arms, rank, varying) for rank in RANKS])
            self.write(cell, value)

    @staticmethod
    def _joined(values: list[Value | None], varying: bool) -> Value:
        result = values[0]
        for value in values[1:]:
            result = join(result, value, varying)
        return join(result, None)

    def _joined_lane(
        self, cell: Cell, base: Value | None, arms: Sequence[tuple[Mapping[Cell, Value], int]], rank: int, varying: bool
    ) -> Value:
        values = [written.get(cell, base) for written, ranks in arms if ranks >> rank & 1]
        if not values:
            values = [written.get(cell, base) for written, _ in arms]
        return self._joined([value if value is None else lane(value, rank) for value in values], varying)

    def write(self, cell: Cell, value: Value) -> None:
        """Give a name a value on all ranks."""
        owner, name = cell
        names = self.owners.get(owner)
        if names is None:
            names = self.owners[owner] = {}
        if self._journals:
            journal = self._journals[-1]
            if cell not in journal:
                journal[cell] = names.get(name)
        names[name] = value
        if owner < self.oldest_written:
            self.oldest_written = owner
