"""What a rehearsal came to: known again when lines move, lost only when it is certain."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from ddpdoctor.files.untrusted import hold
from ddpdoctor.gate.reach import Reach, lost, reach_of
from ddpdoctor.record.model import Job, Rank, RunRecord, StreamState
from ddpdoctor.record.streams.setup import LinesExecuted

SCRIPT = """\
def evaluate(model):
    total = model.hits()
    return total

def main():
    for epoch in range(9):
        train()
        if epoch % 2 == 0:
            evaluate(model)
    save(model)

main()
"""
ALL = (2, 3, 6, 7, 8, 9, 10, 12)


@pytest.fixture
def train(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    _write(file, SCRIPT)
    return file


def _write(file: Path, text: str) -> None:
    file.write_text(text)
    hold(str(file), text.encode())


def reach(
    file: Path, lines: Iterable[int], *, by_chance: Iterable[int] = (), ended: bool = True, late: bool = False
) -> Reach:
    row = LinesExecuted(rank=0, file=str(file), lines=frozenset(lines), by_chance=frozenset(by_chance), late=late)
    record = RunRecord(
        job=Job(kind="rehearsal"),
        ranks=(Rank(rank=0, end="finished" if ended else "ended-by-rehearsal"),),
        lines=(row,),
        streams={"lines": StreamState("complete")},
    )
    found = reach_of(record, str(file.parent))
    assert found is not None
    return found


def told(before: Reach, now: Reach, file: Path) -> list[tuple[str, int, int]]:
    return [(one.function, one.location.line, one.count) for one in lost(before, now, str(file.parent))]


def test_nothing_is_lost_when_lines_move(train: Path) -> None:
    before = reach(train, ALL)
    _write(train, f"import os\n\n{SCRIPT}")
    assert told(before, reach(train, [line + 2 for line in ALL]), train) == []


def test_code_that_stands_and_is_reached_no_more_is_lost(train: Path) -> None:
    before = reach(train, ALL)
    assert told(before, reach(train, (6, 7, 8, 10, 12)), train) == [("evaluate", 2, 1), ("main", 9, 1)]


def test_code_that_was_deleted_or_never_reached_is_not_lost(train: Path) -> None:
    before = reach(train, (6, 7, 8, 10, 12))
    _write(train, SCRIPT.replace("    save(model)\n", ""))
    assert told(before, reach(train, (6, 7, 8, 11)), train) == []


def test_what_the_clock_decides_is_not_lost_on_a_slower_machine(train: Path) -> None:
    before = reach(train, ALL, by_chance=(10,))
    slower = reach(train, set(ALL) - {10}, ended=False)
    assert told(before, slower, train) == []
    assert told(before, reach(train, set(ALL) - {10}), train) == [("main", 10, 1)]
    assert told(before, reach(train, (6, 7, 8, 12), ended=False), train) == [("evaluate", 2, 1), ("main", 9, 1)]


def test_a_python_that_sees_lines_only_from_training_on_loses_none_before(train: Path) -> None:
    assert told(reach(train, ALL), reach(train, (7,), late=True), train) == []
