"""A clock of the system that is set while a job is watched changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddpdoctor.diagnosis.performance.summary import RunSummary
from ddpdoctor.launch.environment import observed
from ddpdoctor.launch.kept_runs import write_plan
from ddpdoctor.monitor.build_snapshot import meanwhile, rank_views
from ddpdoctor.monitor.processes.liveness import _is_silent
from ddpdoctor.profile.watch import live_source
from ddpdoctor.record import layout, writer
from ddpdoctor.record.model import Job, Rank, RunRecord
from ddpdoctor.record.ring_reader import Heartbeat
from ddpdoctor.record.streams.measured import RankHeartbeat
from ddpdoctor.record.writer import EventWriter, epoch_ns, from_system, kept_clock, share_clock

S = 1_000_000_000
_SYSTEM_NS = time.time_ns


@pytest.fixture(params=[-3600, 40, 86_400])
def set_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    step_ns = int(request.param) * S
    monkeypatch.setattr(time, "time_ns", lambda: _SYSTEM_NS() + step_ns)
    return step_ns


def _is_now(time_ns: int) -> bool:
    return abs(time_ns - _SYSTEM_NS()) < 30 * S


def test_events_and_beats_go_on_and_what_torch_notes_is_brought_to_their_clock(tmp_path: Path, set_by: int) -> None:
    assert _is_now(epoch_ns()) and _is_now(from_system(_SYSTEM_NS() + set_by))
    EventWriter(str(tmp_path)).write("torch", version="2.13.0")
    written = json.loads((tmp_path / layout.EVENTS_FILE.format(os.getpid())).read_text())
    assert _is_now(written["time_ns"])


@pytest.mark.usefixtures("set_by")
def test_a_rank_that_beats_is_not_silent_and_its_monitor_looks_on(tmp_path: Path) -> None:
    beat = Heartbeat(
        beat_at_ns=_SYSTEM_NS(), main_cpu_ns=0, stack_hash=0, waiting_row=-1, unchanged_ms=0, forwards=0, backwards=0,
        optimizer_steps=0, answered=0, sleeps_until_ns=0,
    )  # fmt: skip
    assert not _is_silent(beat)
    (tmp_path / layout.JOB_FILE).write_text(json.dumps({"version": layout.VERSION, "kind": "run"}))
    source = live_source(tmp_path)
    try:
        assert _is_now(source.snapshot().now_ns)
    finally:
        source.close()


def test_the_time_of_a_silence_is_said_once() -> None:
    beats = tuple(
        RankHeartbeat(rank=rank, beat_at_ns=100 * S, phase="forward", phase_since_ns=99 * S) for rank in (0, 1)
    )
    ranks = tuple(Rank(rank=rank, end="running") for rank in (0, 1))
    record = RunRecord(job=Job(kind="run", world_size=2), ranks=ranks, heartbeats=beats)
    views = rank_views(record, RunSummary(), 130 * S)
    assert meanwhile(views, 130 * S) == "ranks 0 and 1 no sign of life for 30 s"


def test_a_rank_that_starts_after_the_clock_was_set_counts_as_its_monitor_does(tmp_path: Path) -> None:
    kept = kept_clock()
    earlier = kept | {"offset_ns": kept["offset_ns"] - 3600 * S}
    write_plan(tmp_path, {"version": layout.VERSION, "kind": "run", "clock": earlier})
    environment = os.environ | observed(tmp_path, os.environ) | {"RANK": "0", "WORLD_SIZE": "1"}
    subprocess.run([sys.executable, "-c", "pass"], env=environment, check=True)
    (events,) = tmp_path.glob("events-*.jsonl")
    written = [json.loads(line) for line in events.read_text().splitlines()]
    assert all(_is_now(event["time_ns"] + 3600 * S) for event in written) and written


@pytest.mark.parametrize(
    "kept", [None, 7, {}, {"counts_from": "", "offset_ns": 5}, {"counts_from": "another boot", "offset_ns": 5}]
)
def test_a_clock_of_another_boot_is_not_shared(kept: object) -> None:
    before = writer.offset_ns()
    share_clock(kept)
    assert writer.offset_ns() == before


def test_a_run_of_another_machine_is_told_from_one_of_this_machine() -> None:
    away = {"counts_from": "another boot", "host": "node7"}
    assert writer.kept_elsewhere(away) == "node7"
    assert writer.kept_elsewhere(kept_clock()) == ""
    assert writer.kept_elsewhere(away | {"host": os.uname().nodename}) == "", "the same one, started anew"
    assert [writer.kept_elsewhere(kept) for kept in (None, {}, {"counts_from": "", "host": "node7"}, {"host": 7})] == [
        "",
        "",
        "",
        "",
    ]
