"""The files of a run directory: what is written comes back, and damage is survived."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.probe.journal import Journal
from ddpdoctor.record import layout
from ddpdoctor.record.assembly.assemble import Assembly
from ddpdoctor.record.model import Job
from ddpdoctor.record.reader import RunFiles
from ddpdoctor.record.ring_reader import RingTail
from ddpdoctor.record.writer import CollectiveRing, EventWriter

ROW_BYTES = layout.numbers(1 + len(layout.COLLECTIVES.fields)).size + layout.CHECKSUM_BYTES


def test_rows_and_completions_come_back_in_order(tmp_path: Path) -> None:
    ring = CollectiveRing(str(tmp_path))
    for number in range(5):
        ring.append(0, number, 7, 3, 1, -1)
    ring.complete(2)
    files = RunFiles(tmp_path)
    files.poll()
    columns = files.rings[os.getpid()].columns
    assert list(columns["sequence"]) == [0, 1, 2, 3, 4]
    assert [value > 0 for value in columns["completed_ns"]] == [False, False, True, False, False]
    same = {"signature": 7, "site": 3, "forward_site": -1, "group": 0, "step": 1}
    assert {name: set(columns[name]) for name in same} == {name: {value} for name, value in same.items()}
    ring.complete(0)
    files.poll()
    assert columns["completed_ns"][0] >= columns["started_ns"][0]


def test_an_overflowing_ring_is_marked_truncated(tmp_path: Path) -> None:
    ring = CollectiveRing(str(tmp_path))
    assembly = Assembly(tmp_path)
    EventWriter(str(tmp_path)).write("world", rank=0, local_rank=0, world_size=1, backend="gloo")
    for number in range(layout.COLLECTIVE_ROWS + 1):
        ring.append(0, number, 0, 0, 0, -1)
    assembly.poll()
    assert assembly.record(Job(kind="rehearsal")).stream("collectives").state == "truncated"


def test_a_ring_that_is_truncated_under_a_running_job_costs_its_rows_and_nothing_else(tmp_path: Path) -> None:
    ring, writer = CollectiveRing(str(tmp_path)), EventWriter(str(tmp_path))
    writer.write("world", rank=0, local_rank=0, world_size=1, backend="gloo")
    assembly = Assembly(tmp_path)
    path = tmp_path / layout.COLLECTIVES_FILE.format(os.getpid())

    def sequences() -> list[int]:
        assembly.poll()
        return list(assembly.record(Job(kind="rehearsal")).collectives[0].sequence)

    def append(first: int, end: int) -> None:
        for number in range(first, end):
            ring.append(0, number, 7, 3, 1, -1)
        ring.beat(0, 0, end - 1, 0, 0, 0, 0, 0, 0)

    append(0, 5)
    assert sequences() == list(range(5))
    for size in (layout.HEAD_BYTES + 3 * ROW_BYTES + 7, 10, 0):
        os.truncate(path, size)
        assert sequences() == list(range(5)), "what was read stays"
    assert assembly.record(Job(kind="rehearsal")).stream("collectives").state == "complete"
    append(5, 8)
    os.truncate(path, 0)
    assert sequences() == list(range(5))
    append(8, 10)
    assert sequences() == [0, 1, 2, 3, 4, 8, 9]
    ring.complete(9)
    assembly.poll()
    record = assembly.record(Job(kind="rehearsal"))
    assert [ns > 0 for ns in record.collectives[0].completed_ns] == [False] * 6 + [True]
    assert record.ranks[0].waiting_in == 6
    assert record.stream("collectives").reason.startswith("3 collectives are missing: another program truncated")
    path.unlink()
    append(10, 11)
    assert sequences()[-1] == 10, "the reader has the file as the rank has"


def test_events_are_read_on_after_a_truncation_and_none_twice(tmp_path: Path) -> None:
    writer = EventWriter(str(tmp_path))
    path = tmp_path / layout.EVENTS_FILE.format(os.getpid())
    assembly = Assembly(tmp_path)
    files = assembly.files

    def read() -> list[int]:
        return [event["number"] for _, event in files.poll()]

    for number in range(4):
        writer.write("a", number=number)
    assert read() == [0, 1, 2, 3]
    os.truncate(path, 10)
    writer.write("a", number=4)  # Behind half a line: it is lost.
    writer.write("a", number=5)
    assert (read(), files.damaged_lines) == ([5], 1)
    os.truncate(path, 0)
    writer.write("a", number=6)
    assert (read(), files.damaged_lines) == ([6], 1)
    assert "truncated the record" in assembly.record(Job(kind="rehearsal")).stream("passes").reason


def test_no_file_that_the_script_opens_gets_the_descriptor_of_ours(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from ddpdoctor.record.writer import CollectiveRing\n"
        "from ddpdoctor.record.writer import EventWriter\n"
        "writer, ring = EventWriter(sys.argv[1]), CollectiveRing(sys.argv[1])\n"
        "os.closerange(3, 10_000)\n"
        "kept = [open(os.path.join(sys.argv[1], f'users-{number}'), 'wb') for number in range(50)]\n"
        "writer.write('a')\n"
        "ring.append(0, 0, 0, 0, 0, 0)\n"
        "ring.beat(0, 0, 0, 0, 0, 0, 0, 0, 0)\n"
    )
    subprocess.run((sys.executable, "-c", code, str(tmp_path)), check=True)
    users = list(tmp_path.glob("users-*"))
    assert len(users) == 50 and {path.stat().st_size for path in users} == {0}


def test_a_short_ring_is_refused_and_the_rest_is_read(tmp_path: Path) -> None:
    (tmp_path / layout.COLLECTIVES_FILE.format(os.getpid())).write_bytes(layout.COLLECTIVES.magic + b"short")
    EventWriter(str(tmp_path)).write("world", rank=1, local_rank=1, world_size=2, backend="gloo")
    assembly = Assembly(tmp_path)
    assembly.poll()
    record = assembly.record(Job(kind="rehearsal"))
    assert record.rank_numbers() == (1,)
    assert record.stream("collectives").state == "truncated"
    assert "damaged" in record.stream("collectives").reason


@pytest.mark.parametrize(
    "line", [b"not json\n", b"[1,2]\n", b'{"event": 3}\n', b"\xff\xfe\n", b'{"event":"wrap","wrap":0}\n']
)
def test_a_damaged_line_is_counted_and_passed_over(tmp_path: Path, line: bytes) -> None:
    writer = EventWriter(str(tmp_path))
    path = tmp_path / layout.EVENTS_FILE.format(os.getpid())
    path.write_bytes(line)
    writer.write("world", rank=0, local_rank=0, world_size=1, backend="gloo")
    assembly = Assembly(tmp_path)
    assembly.poll()
    record = assembly.record(Job(kind="rehearsal"))
    assert record.rank_numbers() == (0,)
    assert assembly.files.damaged_lines + len(assembly.faults) == 1
    assert record.stream("passes").state == "truncated"


@pytest.mark.parametrize(("harmed", "whole"), [("collectives", "passes"), ("wraps", "loaders")])
def test_a_fault_of_the_probe_makes_its_streams_incomplete(tmp_path: Path, harmed: str, whole: str) -> None:
    CollectiveRing(str(tmp_path))
    writer = EventWriter(str(tmp_path))
    writer.write("world", rank=0, local_rank=0, world_size=1, backend="gloo")
    writer.write("probe_fault", where="collectives", text="KeyError('x')", harms=[harmed])
    assembly = Assembly(tmp_path)
    assembly.poll()
    record = assembly.record(Job(kind="rehearsal"))
    assert record.stream(harmed).state == "truncated" and "KeyError" in record.stream(harmed).reason
    assert record.stream(whole).state == "complete"


def test_a_line_is_read_only_once_it_is_whole(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    path = tmp_path / layout.EVENTS_FILE.format(9)
    path.write_bytes(b'{"event":"a"}\n{"event"')
    assert [event["event"] for _, event in files.poll()] == ["a"]
    with path.open("ab") as file:
        file.write(b':"b"}\n')
    assert [event["event"] for _, event in files.poll()] == ["b"]


def test_a_writer_without_a_disk_goes_quiet(tmp_path: Path) -> None:
    writer = EventWriter(str(tmp_path / "missing"))
    writer.write("a")
    assert writer.lost == 1


def test_what_a_process_did_before_its_rank_was_known_is_its_ranks(tmp_path: Path) -> None:
    writer = EventWriter(str(tmp_path))
    assembly = Assembly(tmp_path)
    writer.write("process", pid=os.getpid(), parent=1, rank=None, kind="start")
    writer.write("optimizer_step", optimizer=0, ordinal=1, site=-1)
    writer.write("wait_begun", number=1, kind="init_process_group", ranks=[], site=-1)
    assembly.poll()
    record = assembly.record(Job(kind="rehearsal"))
    assert ([wait.rank for wait in record.waits], record.optimizer_steps) == ([-1], ()), "it waits for its world"
    writer.write("wait_ended", number=1)
    writer.write("world", rank=1, local_rank=1, world_size=2, backend="gloo")
    writer.write("optimizer_step", optimizer=0, ordinal=2, site=-1)
    assembly.poll()
    record = assembly.record(Job(kind="rehearsal"))
    assert [(wait.rank, wait.ended_ns > 0) for wait in record.waits] == [(1, True)]
    assert [(step.rank, step.ordinal) for step in record.optimizer_steps] == [(1, 1), (1, 2)]
    assert not assembly.faults


@pytest.mark.parametrize("recovers", [False, True])
def test_events_that_could_not_be_written_make_the_record_incomplete(tmp_path: Path, recovers: bool) -> None:
    """A full disk: the ring was reserved before, and the next event that can be written tells of the lost ones."""
    journal = Journal(str(tmp_path), {})
    journal.event("world", rank=0, local_rank=0, world_size=1, backend="gloo")
    if not recovers:
        journal.ring = CollectiveRing(str(tmp_path))
    assembly = Assembly(tmp_path)
    assembly.poll()
    assert assembly.record(Job(kind="rehearsal")).stream("passes").state == "complete"
    working, journal.writer._descriptor = journal.writer._descriptor, -1
    journal.event("forward", wrap=0)
    journal.event("forward", wrap=0)
    if recovers:
        journal.writer._descriptor = working
        journal.event("torch", version="2")
    assembly.poll()
    stream = assembly.record(Job(kind="rehearsal")).stream("passes")
    assert (stream.state, stream.reason) == ("truncated", "2 events could not be written")


class _Mute(Exception):
    def __str__(self) -> str:
        sys.exit(3)


def test_names_and_texts_of_all_kinds_come_back(tmp_path: Path) -> None:
    writer = EventWriter(str(tmp_path))
    names = ["a\nb", os.fsdecode(b"\xff\xfe"), "q\"'\\", "\x1b[31m", "\u202e", "\0", "\u2028"]
    for name in names:
        writer.write("file", path=name, value=float("nan"))
    files = RunFiles(tmp_path)
    assert [event["path"] for _, event in files.poll()] == names
    assert files.damaged_lines == 0


def test_an_exception_without_a_text_is_told(tmp_path: Path) -> None:
    from ddpdoctor.probe.process import ProcessEnd, text_of

    assert text_of(_Mute()) == "<its __str__ raised SystemExit>"
    assert text_of(ValueError("said")) == "said"
    ProcessEnd(Journal(str(tmp_path), {"kind": "rehearsal"})).report(_Mute())
    (raised,) = (event for _, event in RunFiles(tmp_path).poll() if event["event"] == "raised")
    assert raised["type"] == "_Mute"
    assert raised["message"] == "<its __str__ raised SystemExit>"


def test_how_a_process_ends_is_told_before_what_takes_time(tmp_path: Path) -> None:
    from ddpdoctor.probe.process import ProcessEnd

    journal = Journal(str(tmp_path), {"kind": "run"})
    end = ProcessEnd(journal)
    end.before_report, end.after_report = (lambda: journal.event("rows")), (lambda: journal.event("recorder"))
    end.report(ValueError("bad batch"))
    assert [event["event"] for _, event in RunFiles(tmp_path).poll()] == ["rows", "raised", "recorder"]


@pytest.mark.parametrize("last", ["atexit.register(lambda: sys.exit(3))", "thread.start(); thread.join()", "pass"])
def test_only_an_exit_of_the_script_counts(last: str, tmp_path: Path) -> None:
    code = f"""
import atexit, sys, threading
from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.process import ProcessEnd
ProcessEnd(Journal({str(tmp_path)!r}, {{"kind": "run"}})).install()
thread = threading.Thread(target=lambda: sys.exit(3))
{last}
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    (ended,) = (event for _, event in RunFiles(tmp_path).poll() if event["event"] == "exit")
    assert (ended["code"], ended["finished"]) == (0, True)


def test_a_row_that_is_half_written_is_not_taken_in_before_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At one time in 256 the checksum ends in a zero, and the row without its last byte is the whole row.
    monkeypatch.setattr("ddpdoctor.record.writer.epoch_ns", lambda: 1_795_000_000_000_000_000)
    ring = CollectiveRing(str(tmp_path))
    tail = RingTail(tmp_path / layout.COLLECTIVES_FILE.format(os.getpid()), layout.COLLECTIVES)
    ring.append(0, 0, 7, 3, 1, -1)
    ring.append(0, 1, 7, 3, 1, -1)
    path, at = tmp_path / layout.COLLECTIVES_FILE.format(os.getpid()), layout.HEAD_BYTES + ROW_BYTES
    whole = path.read_bytes()[at : at + ROW_BYTES]
    assert whole[-1]
    with path.open("r+b", buffering=0) as file:
        for there in (8, 24, 40, ROW_BYTES - 1):
            os.pwrite(file.fileno(), whole[:there].ljust(ROW_BYTES, b"\0"), at)
            tail.read()
            assert list(tail.columns["sequence"]) == [0], there
        os.pwrite(file.fileno(), whole, at)
    tail.read()
    assert [list(tail.columns[name]) for name in ("sequence", "signature", "site")] == [[0, 1], [7, 7], [3, 3]]
    assert tail.missing == 0
    ring.complete(1)
    tail.read()
    assert tail.columns["completed_ns"][1] > 0
