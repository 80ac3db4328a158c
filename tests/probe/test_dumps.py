"""What the pulse writes of progress and of the flight recorder belongs to one moment."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.live.heartbeat import DUMPED_AGAIN, PulseThread


class MovingRank:
    """A training thread that enqueues a collective after each of the first looks at its progress."""

    def __init__(self, moves: int) -> None:
        self.enqueued = 3
        self.written: list[tuple[str, int]] = []
        self._moves = moves

    def counts(self) -> tuple[int, int, int]:
        """As the recorder tells them."""
        return self.enqueued, self.enqueued - 1, 1

    def note_progress(self) -> None:
        """Write how far the passes have come, before the thread goes on."""
        self.written.append(("progress", self.enqueued))
        if self._moves:
            self._moves -= 1
            self.enqueued += 1

    def dump(self, reason: str) -> bool:
        """Write the entries."""
        self.written.append(("flights", self.enqueued))
        return True


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_progress_and_flight_recorder_are_written_of_one_moment(tmp_path: Path, moves: int) -> None:
    rank = MovingRank(moves)
    _dump(tmp_path, rank)
    assert rank.written[-2:] == [("progress", 3 + moves), ("flights", 3 + moves)]
    assert len(rank.written) == 2 * (1 + moves)


def test_a_rank_that_goes_on_and_on_is_written_a_few_times_only(tmp_path: Path) -> None:
    rank = MovingRank(100)
    _dump(tmp_path, rank)
    assert len(rank.written) == 2 * DUMPED_AGAIN


def _dump(folder: Path, rank: MovingRank) -> None:
    journal = Journal(str(folder), {"project_root": str(folder), "kind": "run"})
    parts: Any = SimpleNamespace(journal=journal)
    pulse = PulseThread(parts, cast("Any", rank), parts, rank.note_progress, lambda: None)
    pulse._dump("idle")
