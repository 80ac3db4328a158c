"""The history of a run: one writes, all read, it stays small, and it replays."""

from __future__ import annotations

import os
import sqlite3
from itertools import pairwise
from pathlib import Path

import pytest

from ddpdoctor.diagnosis.performance.summarise import summarise
from ddpdoctor.diagnosis.performance.summary import RunSummary, RunVerdict
from ddpdoctor.errors import RecordError
from ddpdoctor.monitor import history
from ddpdoctor.monitor.build_snapshot import Look, build_snapshot
from ddpdoctor.monitor.history import FILE, HistoryWriter, dropped, recorded_moments
from ddpdoctor.monitor.replay import MOST_SLICES, Series, final_snapshot, recorded_run
from ddpdoctor.monitor.snapshot import Snapshot
from ddpdoctor.record import layout
from tests.diagnosis.measured_job import MeasuredJob

SECOND_NS = 1_000_000_000


def _snapshot(now_ns: int, steps: int = 40) -> Snapshot:
    record = MeasuredJob().run(steps, {"forward": 10, "backward": 20}, transfer=5).record()
    look = Look(
        now_ns=now_ns,
        record=record,
        summary=summarise(record),
        verdict=RunVerdict(state="healthy", text="well"),
        state="running",
    )
    return build_snapshot(look, Series(), "train.py", "/run")


def _rows(directory: Path, query: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(directory / FILE)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def test_any_sql_tool_reads_the_steps_while_they_are_written(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path)
    writer.write(_snapshot(5 * SECOND_NS))
    assert _rows(tmp_path, "select rank, step, round(forward_ns / 1e6), round(step_p50_ns / 1e6) from steps") == [
        (0, 40, 10.0, 35.0),
        (1, 40, 10.0, 35.0),
    ]
    writer.write(_snapshot(6 * SECOND_NS))
    assert recorded_moments(tmp_path) == [5 * SECOND_NS, 6 * SECOND_NS]
    writer.close()


def test_a_second_monitor_writes_nothing_until_the_first_has_gone(tmp_path: Path) -> None:
    first, second = HistoryWriter(tmp_path), HistoryWriter(tmp_path)
    second.write(_snapshot(SECOND_NS))
    first.write(_snapshot(2 * SECOND_NS))
    first.close()
    assert recorded_moments(tmp_path) == [2 * SECOND_NS]
    assert (first.fault, second.fault) == ("", "")
    third = HistoryWriter(tmp_path)
    third.write(_snapshot(3 * SECOND_NS))
    third.close()
    assert recorded_moments(tmp_path) == [2 * SECOND_NS, 3 * SECOND_NS]


def test_a_long_run_is_thinned_and_keeps_its_beginning_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MOST_SNAPSHOTS", 10)
    monkeypatch.setattr(history, "MOST_ROWS", 20)
    writer = HistoryWriter(tmp_path)
    for second in range(1, 60):
        writer.write(_snapshot(second * SECOND_NS, steps=5))
    writer.close()
    moments = recorded_moments(tmp_path)
    assert (moments[0], moments[-1]) == (SECOND_NS, 59 * SECOND_NS)
    assert len(moments) <= 10
    (rows,) = _rows(tmp_path, "select count(*), min(at_ns), max(at_ns) from steps")
    assert rows == (rows[0], SECOND_NS, 59 * SECOND_NS)
    assert isinstance(rows[0], int)
    assert rows[0] <= 20


def test_of_a_long_run_no_part_is_forgotten() -> None:
    moments: list[int] = []
    for second in range(20_000):
        moments.append(second)
        if len(moments) > 100:
            gone = set(dropped(moments))
            moments = [moment for moment in moments if moment not in gone]
    assert (moments[0], moments[-1]) == (0, 19_999)
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    assert max(gaps) <= 4 * 20_000 / len(moments), "every part of the course is there"
    assert gaps[-10:] == [1] * 10, "the newest moments lie close"


def test_a_directory_that_cannot_be_written_costs_the_history_only(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path / "gone")
    writer.write(_snapshot(SECOND_NS))
    writer.close()
    assert writer.fault == "the history is not written: No such file or directory"


def test_a_history_that_another_program_empties_goes_on_and_one_that_it_damages_ends_with_a_sentence(
    tmp_path: Path,
) -> None:
    writer = HistoryWriter(tmp_path)
    writer.write(_snapshot(SECOND_NS))
    (tmp_path / FILE).write_bytes(b"")
    writer.write(_snapshot(2 * SECOND_NS))
    assert not writer.fault and recorded_moments(tmp_path) == [2 * SECOND_NS]
    (tmp_path / FILE).write_bytes(b"no database at all, but long enough to be taken for one" * 400)
    writer.write(_snapshot(3 * SECOND_NS))
    assert writer.fault.startswith("the history is no longer written: another program has damaged history.sqlite (")


@pytest.mark.parametrize("content", [b"", b"no database at all, but long enough to be taken for one" * 40])
def test_a_damaged_history_is_said_to_be_damaged(content: bytes, tmp_path: Path) -> None:
    (tmp_path / layout.JOB_FILE).write_text("{}")
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(RecordError, match="damaged"):
        final_snapshot(tmp_path)


def test_a_replay_goes_through_what_was_shown(tmp_path: Path) -> None:
    (tmp_path / layout.JOB_FILE).write_text("{}")
    writer = HistoryWriter(tmp_path)
    for second in (10, 15, 20):
        writer.write(_snapshot(second * SECOND_NS, steps=second))
    writer.close()
    replay = recorded_run(tmp_path)
    assert replay.playback().length_ns == 10 * SECOND_NS
    assert (replay.snapshot().steps, replay.snapshot().source) == (20, "replay")
    replay.seek(7 * SECOND_NS)
    assert replay.snapshot().now_ns == 15 * SECOND_NS
    replay.seek(-1)
    assert (replay.snapshot().steps, replay.playback().elapsed_ns) == (10, 0)
    replay.play(1e9)
    while replay.snapshot().steps != 20:
        pass
    assert replay.playback().elapsed_ns == 10 * SECOND_NS
    assert final_snapshot(tmp_path) == _snapshot(20 * SECOND_NS, steps=20)


def test_the_series_of_a_long_run_stays_short_and_covers_all_of_it() -> None:
    series, now_ns = Series(), 0
    record = MeasuredJob().run(20, {"forward": 10}, slower={1: {"forward": 4}}, transfer=1).record()
    for _ in range(5 * MOST_SLICES):
        summary = summarise(record)
        now_ns += series.slice_ns
        assert series.is_due(now_ns)
        series.add(summary, now_ns)
    shown = series.history()
    assert MOST_SLICES / 2 <= len(shown.slices_at_ns) <= MOST_SLICES
    assert shown.slices_at_ns[-1] == now_ns
    assert shown.step_p50_ns[0] is not None
    assert len(series.lateness_ns(1)) == len(shown.slices_at_ns)


def test_a_slice_shows_nothing_once_a_newer_step_is_overdue_however_long_steps_are() -> None:
    for step_ms, none_from in ((10.0, 2), (2_000.0, 5)):
        series = Series()
        record = MeasuredJob().run(20, {"forward": step_ms}).record()
        summary = summarise(record)
        assert summary.measured_at_ns is not None
        for second in range(8):
            series.add(summary, summary.measured_at_ns + second * SECOND_NS)
        known = [value is not None for value in series.history().step_p50_ns]
        assert known == [second < none_from for second in range(8)]
        assert len(series.lateness_ns(0)) == 8


def test_a_run_is_seen_in_its_first_minute_second_by_second() -> None:
    series = Series()
    series.add(RunSummary(), 0)
    assert series.history().slices_at_ns == (), "the course begins with the first step"
    summary = summarise(MeasuredJob().run(20, {"forward": 10}).record())
    for second in range(60):
        assert series.is_due(second * SECOND_NS)
        series.add(summary, second * SECOND_NS)
    assert len(series.history().slices_at_ns) == 60


def test_no_file_beside_it_is_mapped_and_who_reads_does_not_end_the_writing(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path)
    writer.write(_snapshot(SECOND_NS))
    mapped = Path("/proc/self/maps").read_text()
    assert str(tmp_path) not in mapped, "who truncates a mapped file kills the monitor by SIGBUS"
    reader = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    reader.execute("begin")
    reader.execute("select * from steps").fetchone()
    writer.write(_snapshot(2 * SECOND_NS))
    reader.execute("rollback")
    reader.close()
    writer.write(_snapshot(3 * SECOND_NS))
    assert writer.fault == ""
    assert recorded_moments(tmp_path) == [SECOND_NS, 3 * SECOND_NS]
    writer.close()


@pytest.mark.parametrize("name", [FILE, f"{FILE}-journal"])
@pytest.mark.parametrize("other", ["pipe", "zero", "directory"])
def test_what_takes_the_place_of_its_files_ends_the_writing_and_nothing_else(
    tmp_path: Path, name: str, other: str
) -> None:
    writer = HistoryWriter(tmp_path)
    writer.write(_snapshot(SECOND_NS))
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if other == "pipe":
        os.mkfifo(path)  # SQLite would wait for someone who writes to it.
    elif other == "zero":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    writer.write(_snapshot(2 * SECOND_NS))
    assert writer.fault.startswith("the history is no longer written: ")
    writer.close()
