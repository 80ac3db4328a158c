"""What the heartbeat writes of progress and of the flight recorder belongs to one moment."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.live.heartbeat import DUMPED_AGAIN, LATE_DUMPS_NS, SUSPICIOUS_AFTER_MS, HeartbeatThread


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

    def dump(self) -> bool:
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


def test_dumps_get_seldom_where_a_rank_pauses_in_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = MovingRank(0)
    heartbeat = _heartbeat(tmp_path, rank)
    clock = SimpleNamespace(now_ns=10**13)
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock.now_ns)
    written_at_step = []
    for step in range(1, 61):
        for _ in range(4 * SUSPICIOUS_AFTER_MS // 1_000):  # each step stands twice as long as a pause may
            clock.now_ns += 500_000_000
            before = len(rank.written)
            heartbeat._suspect((step, step - 1, step, 1), True, clock.now_ns, late=False)
            written_at_step += [step] * (len(rank.written) > before)
    gaps = [later - earlier for earlier, later in itertools.pairwise(written_at_step)]
    assert written_at_step[:2] == [1, 2]
    assert gaps == sorted(gaps)
    assert len(written_at_step) <= 8, "60 pauses of 3 s: the gap doubles from one dump to the next"
    assert heartbeat._gap_ns > LATE_DUMPS_NS


def _dump(folder: Path, rank: MovingRank) -> None:
    _heartbeat(folder, rank)._dump()


def _heartbeat(folder: Path, rank: MovingRank) -> HeartbeatThread:
    journal = Journal(str(folder), {"project_root": str(folder), "kind": "run"})
    parts: Any = SimpleNamespace(journal=journal)
    return HeartbeatThread(parts, cast("Any", rank), parts, rank.note_progress, lambda: None)
