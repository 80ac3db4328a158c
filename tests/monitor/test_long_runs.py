"""A run of many hours, replayed at speed into the real reader: the monitor and its files grow no further."""

from __future__ import annotations

import gc
import os
import sqlite3
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddpdoctor.monitor.history import FILE, MOST_SNAPSHOTS
from ddpdoctor.monitor.replay import MOST_SLICES
from ddpdoctor.profile import watch
from ddpdoctor.profile.recorded_run import recorded
from ddpdoctor.record import layout
from ddpdoctor.record.reader import RunPlan
from tests.benchmarks.simulated_ranks import SimulatedRank

S = 1_000_000_000
STARTED_NS = 1_700_000_000 * S
STEP_NS = S
LOOKS = 260
STEPS_A_LOOK = 90
FLAT_BYTES = 500_000


def test_six_hours_need_no_more_memory_than_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_ns=STARTED_NS)
    monkeypatch.setattr(watch, "epoch_ns", lambda: clock.now_ns)
    # The second rank needs a process that lives as well.
    ranks = [SimulatedRank(tmp_path, rank, 2, pid, STEP_NS, STARTED_NS) for rank, pid in enumerate((os.getpid(), 1))]
    source = watch.RunSource(tmp_path, RunPlan(), None)
    held: list[int] = []
    try:
        for look in range(LOOKS):
            clock.now_ns += STEPS_A_LOOK * STEP_NS
            for rank in ranks:
                rank.make_steps(clock.now_ns)
                rank.beat(clock.now_ns)
            snapshot = source.snapshot()
            if look == LOOKS // 2:
                tracemalloc.start()
            if look in (LOOKS // 2 + 20, LOOKS - 1):
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
        source.close()
    assert (snapshot.state, snapshot.steps) == ("running", LOOKS * STEPS_A_LOOK)
    assert held[1] - held[0] < FLAT_BYTES
    assert len(snapshot.history.slices_at_ns) <= MOST_SLICES
    assert snapshot.history.slices_at_ns[0] < STARTED_NS + 3600 * S
    connection = sqlite3.connect(tmp_path / FILE)
    (kept,) = connection.execute("select count(*) from snapshots").fetchone()
    connection.close()
    assert 0 < kept <= MOST_SNAPSHOTS
    rings = sum(path.stat().st_size for path in tmp_path.glob("*.ring"))
    assert rings == 2 * sum(
        layout.HEAD_BYTES + layout.LIVE_ROWS * (layout.numbers(1 + len(fields)).size + 4)
        for fields in (layout.STEP_FIELDS, layout.CALL_FIELDS)
    )


def test_a_report_on_a_run_that_goes_on_writes_nothing_into_its_directory(tmp_path: Path) -> None:
    (tmp_path / layout.JOB_FILE).write_text('{"version": 1, "kind": "run", "job": {"kind": "run"}}')
    rank = SimulatedRank(tmp_path, 0, 1, os.getpid(), STEP_NS, STARTED_NS)
    rank.make_steps(STARTED_NS + 20 * STEP_NS)
    before = sorted(path.name for path in tmp_path.iterdir())
    snapshot, _ = recorded(tmp_path)
    assert snapshot.ranks
    assert sorted(path.name for path in tmp_path.iterdir()) == before
