"""Rings: what the writer put in comes out, whatever happened to the file meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddpdoctor.errors import RecordError
from ddpdoctor.record import layout
from ddpdoctor.record.ring_reader import RingTail
from ddpdoctor.record.writer import Ring


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "calls-1.ring"


def ring(path: Path, *, steps: bool = False) -> Ring:
    return Ring(str(path), layout.STEPS if steps else layout.CALLS)


def tail(path: Path, *, steps: bool = False) -> RingTail:
    return RingTail(path, layout.STEPS if steps else layout.CALLS)


def call(sequence: int, left_at_ns: int = 9) -> tuple[int, ...]:
    return (1, 0, sequence, 3, 5, left_at_ns, 400, -1)


def write(ring: Ring, first: int, end: int) -> None:
    for sequence in range(first, end):
        ring.put(call(sequence))
    ring.flush()


def sequences(tail: RingTail) -> list[int]:
    tail.read()
    return list(tail.columns["sequence"])


def test_a_reader_keeps_as_many_of_the_newest_rows_as_it_is_told_whether_it_comes_early_or_late(path: Path) -> None:
    writer, early = ring(path), tail(path)
    early.most_rows = 100
    for first in range(0, 9_000, 1000):
        write(writer, first, first + 1000)
        kept = sequences(early)
        assert kept == list(range(first + 1000 - len(kept), first + 1000))
        assert 100 <= len(kept) <= 125
    late = tail(path)
    late.most_rows = 100
    assert sequences(late) == list(range(8_900, 9_000))
    assert late.dropped == 8_900
    late.forget_before("entered_at_ns", 6)
    assert (list(late.numbers), late.dropped) == ([], 9_000)


def test_rows_are_read_as_they_come(path: Path) -> None:
    writer, reader = ring(path), tail(path)
    assert sequences(reader) == []
    write(writer, 0, 3)
    assert sequences(reader) == [0, 1, 2]
    write(writer, 3, 1000)
    assert sequences(reader) == list(range(1000))
    assert reader.dropped == 0


def test_a_reader_that_comes_late_has_the_newest_rows_and_says_how_many_are_gone(path: Path) -> None:
    writer = ring(path)
    for first in range(0, 10_000, 1000):
        write(writer, first, first + 1000)
    reader = tail(path)
    kept = list(range(10_000 - layout.LIVE_ROWS, 10_000))
    assert sequences(reader) == kept
    assert reader.dropped == kept[0]


def test_a_call_that_is_not_over_is_seen_and_then_finished(path: Path) -> None:
    writer, reader = ring(path), tail(path)
    write(writer, 0, 2)
    writer.flush((writer.next, call(2, left_at_ns=0)))
    assert sequences(reader) == [0, 1, 2]
    assert list(reader.columns["left_at_ns"]) == [9, 9, 0]
    write(writer, 2, 4)
    assert sequences(reader) == [0, 1, 2, 3]
    assert list(reader.columns["left_at_ns"]) == [9, 9, 9, 9]


@pytest.mark.parametrize("harm", ["truncated", "overwritten", "deleted"])
def test_a_file_that_is_harmed_costs_rows_and_nothing_else(path: Path, harm: str) -> None:
    writer, reader = ring(path), tail(path)
    write(writer, 0, 10)
    assert len(sequences(reader)) == 10
    if harm == "truncated":
        os.truncate(path, 0)
    elif harm == "overwritten":
        path.write_bytes(os.urandom(300_000))
    else:
        path.unlink()
    write(writer, 10, 20)
    writer.write_head()
    assert sequences(reader) == list(range(20))
    assert writer.lost == 0
    if harm != "deleted":
        assert tail(path).pid == os.getpid()


@pytest.mark.parametrize("size", [0, 100, layout.HEAD_BYTES + 700])
def test_rows_that_nobody_had_read_are_missed_and_the_next_ones_read(path: Path, size: int) -> None:
    writer, reader = ring(path), tail(path)
    write(writer, 0, 20)
    assert len(sequences(reader)) == 20
    write(writer, 20, 50)
    os.truncate(path, size)
    write(writer, 50, 60)
    assert sequences(reader) == list(range(20)), "the writer has not said yet that there is more"
    writer.write_head()
    assert sequences(reader) == list(range(20)), "a row may be torn for once"
    assert sequences(reader) == [*range(20), *range(50, 60)]
    assert (reader.missing, reader.dropped) == (30, 30)
    write(writer, 60, 70)
    os.truncate(path, 0)
    writer.write_head()
    for _ in range(3):
        sequences(reader)
    write(writer, 70, 9_000)
    assert sequences(reader)[-1] == 8_999
    assert reader.missing == 40


def test_a_full_disk_is_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ring(path)

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ddpdoctor.record.writer.pwrite", full)
    write(writer, 0, 3)
    assert writer.lost == 3


def test_a_heartbeat_that_no_row_can_hold_is_counted_and_the_next_one_written(path: Path) -> None:
    writer, reader = ring(path, steps=True), tail(path, steps=True)
    heartbeat = tuple(range(len(layout.HEARTBEAT_FIELDS)))
    writer.write_head((1 << 63, *heartbeat[1:]))
    assert (writer.lost, reader.live_heartbeat()) == (1, None)
    writer.write_head(heartbeat)
    assert reader.live_heartbeat() is not None


def test_a_file_of_another_version_is_refused_and_an_empty_one_awaited(path: Path) -> None:
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="still empty"):
        tail(path)
    identity = layout.IDENTITY.pack(layout.CALLS.magic, layout.VERSION + 1, 76, layout.LIVE_ROWS, 1, 0)
    path.write_bytes(identity + bytes(8000))
    with pytest.raises(RecordError, match="not written by this version"):
        tail(path)
    path.write_bytes(b"x" * 8000)
    with pytest.raises(RecordError, match="damaged"):
        tail(path)


def test_a_reader_asks_and_the_writer_hears_it(path: Path) -> None:
    writer, reader = ring(path), tail(path)
    assert writer.requested() == 0
    reader.ask_for_stacks(7)
    writer.write_head()
    assert writer.requested() == 7
