"""The variables of the rank projection, with a journal so that the arms of a branch can be tried in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpdoctor.source.values import ALL_LANES, RANKS, Value, join, lane, lanes_of

Cell = tuple[int, str]
"""A scope or an object by its number, and a name in it."""


NEVER = 1 << 60
"""Larger than any number of a scope."""


class Store:
    """Values by scope and name."""

    def __init__(self) -> None:
        self._cells: dict[Cell, Value] = {}
        self._journals: list[dict[Cell, Value | None]] = []
        self._names: dict[int, dict[str, None]] = {}
        self.oldest_written = NEVER
        """Smallest number of a scope or object that was written since somebody set this to ``NEVER``."""

    def get(self, owner: int, name: str) -> Value | None:
        """The value of a name, None when it has none."""
        return self._cells.get((owner, name))

    def set(self, owner: int, name: str, value: Value, ranks: int = ALL_LANES) -> None:
        """Give a name a value on the ranks of a mask; the others keep theirs."""
        if ranks != ALL_LANES:
            old = self._cells.get((owner, name))
            if old is not None and old != value:
                value = lanes_of([lane(value if ranks >> rank & 1 else old, rank) for rank in RANKS])
        self._write((owner, name), value)

    def names(self, owner: int) -> tuple[str, ...]:
        """The names in a scope or of an object's attributes, in the order of their first assignment."""
        return tuple(self._names.get(owner, {}))

    @property
    def depth(self) -> int:
        """How many journals are open."""
        return len(self._journals)

    def begin(self) -> None:
        """Start a journal."""
        self._journals.append({})

    def undo(self) -> dict[Cell, Value]:
        """Take back everything written since ``begin``; return what was written."""
        journal = self._journals.pop()
        written = {cell: self._cells[cell] for cell in journal if cell in self._cells}
        for cell, old in journal.items():
            if old is None:
                self._cells.pop(cell, None)
            else:
                self._cells[cell] = old
        return written

    def put(self, written: Mapping[Cell, Value]) -> None:
        """Write values that were taken back."""
        for cell, value in written.items():
            self._write(cell, value)

    def merge(self, written: Mapping[Cell, Value], varying: bool = False) -> None:
        """Join values that a path left behind with the present ones."""
        for cell, value in written.items():
            self._write(cell, join(self._cells.get(cell), value, varying))

    def merge_arms(self, arms: Sequence[tuple[Mapping[Cell, Value], int]], varying: bool) -> None:
        """Join what alternative paths wrote; each comes with the mask of the ranks that reached its end."""
        cells: dict[Cell, None] = {}
        for written, _ in arms:
            cells.update(dict.fromkeys(written))
        alike = len({ranks for _, ranks in arms}) == 1
        for cell in cells:
            base = self._cells.get(cell)
            if alike:
                value = self._joined([written.get(cell, base) for written, _ in arms], varying)
            else:
                value = lanes_of([self._joined_lane(cell, base, arms, rank, varying) for rank in RANKS])
            self._write(cell, value)

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

    def _write(self, cell: Cell, value: Value) -> None:
        if self._journals:
            self._journals[-1].setdefault(cell, self._cells.get(cell))
        self._cells[cell] = value
        if cell[0] < self.oldest_written:
            self.oldest_written = cell[0]
        self._names.setdefault(cell[0], {})[cell[1]] = None
