"""Makes the stream of executed lines of what the ranks wrote about them."""

from __future__ import annotations

from collections.abc import Callable

from ddpdoctor.record import events
from ddpdoctor.record.model import StreamState
from ddpdoctor.record.streams.places import LinesExecuted


class LineRows:
    """Takes in the events of one run; the same line may come more than once."""

    def __init__(self, rank_of: Callable[[int], int | None]) -> None:
        self._rank_of = rank_of
        self._lines: dict[tuple[int, str], set[int]] = {}
        self._unwatched: dict[tuple[int, str], set[int]] = {}
        self._by_chance: dict[tuple[int, str], set[int]] = {}
        self._begun: set[int] = set()
        self._late: set[int] = set()
        self._lost = ""

    def rows(self) -> tuple[LinesExecuted, ...]:
        """Return the lines by rank and file."""
        found: dict[tuple[int, str], LinesExecuted] = {}
        for (pid, file), lines in self._lines.items():
            rank = self._rank_of(pid)
            if rank is not None:
                # A script that spawns its ranks twice has two processes for each.
                other = found.get((rank, file), LinesExecuted(rank=rank, file=file))
                found[rank, file] = LinesExecuted(
                    rank=rank,
                    file=file,
                    lines=other.lines | lines,
                    unwatched=other.unwatched | self._unwatched.get((pid, file), set()),
                    by_chance=other.by_chance | self._by_chance.get((pid, file), set()),
                    late=other.late or pid in self._late,
                )
        return tuple(found[key] for key in sorted(found))

    def state(self) -> StreamState:
        """Return whether every line is known from where training began."""
        if self._lost:
            return StreamState("truncated", self._lost)
        return StreamState("complete") if self._begun else StreamState("absent", "no rank reached its training")

    def on_begun(self, pid: int, event: events.LinesBegun) -> None:
        """Take in that the lines of a process are noted from now on."""
        self._begun.add(pid)
        if event.late:
            self._late.add(pid)

    def on_lines(self, pid: int, event: events.Lines) -> None:
        """Take in executed lines."""
        key = (pid, event.file)
        new = set(event.lines) - self._lines.get(key, set())
        self._lines.setdefault(key, set()).update(new)
        if event.by_chance:
            self._by_chance.setdefault(key, set()).update(new)
        self._unwatched.setdefault(key, set()).update(event.unwatched)

    def on_lost(self, pid: int, event: events.LinesLost) -> None:
        """Take in that lines are noted no longer."""
        self._lost = self._lost or event.reason
