"""What a run stood in when its monitor was killed with it is what it ended in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ddpdoctor.errors import RecordError
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.launch.kept_runs import live_processes
from ddpdoctor.monitor.history import HistoryWriter
from ddpdoctor.monitor.replay import final_snapshot
from ddpdoctor.monitor.snapshot import Snapshot, WaitView
from ddpdoctor.profile.recorded_run import recorded
from ddpdoctor.record import layout
from tests.benchmarks.simulated_ranks import SimulatedRank
from tests.jobs_of_tests import kill_marked, marked
from tests.monitor.watched import HEAD, MOST_S

HANG = """
import threading
model = DDP(nn.Linear(8, 8))
for _ in range(60):
    model(torch.randn(4, 8)).sum().backward()
    time.sleep(0.01)
if rank == 1:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
dist.barrier()
"""
S = 1_000_000_000
STARTED_NS = 1_700_000_000 * S
GONE = (1 << 22) - 5
"""Two numbers that no process has."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    kill_marked(tmp_path)


def _stands(run: Path) -> bool:
    try:
        return final_snapshot(run).stall is not None
    except RecordError:
        return False


def test_a_standstill_outlives_the_monitor_that_has_seen_it(folder: Path) -> None:
    (folder / "train.py").write_text(HEAD + HANG)
    words = ("profile", "--no-tui", "--nproc", "2", "--run-dir", "run", "train.py")
    environment = {**marked(os.environ, folder), "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder / "state")}
    with (folder / "output").open("wb") as output:
        watch = subprocess.Popen(
            (sys.executable, "-m", "ddpdoctor", *words), cwd=folder, env=environment, stdout=output, stderr=output
        )
    deadline = time.monotonic() + MOST_S
    while not _stands(folder / "run") and watch.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    watch.kill()
    kill_marked(folder)
    watch.wait()
    while live_processes(folder / "run") and time.monotonic() < deadline:
        time.sleep(0.1)
    stood = final_snapshot(folder / "run")
    assert stood.stall is not None, (folder / "output").read_text()
    snapshot, _ = recorded(folder / "run")
    assert snapshot.state == "ended" and snapshot.verdict.state == "broken"
    assert snapshot.verdict.text == stood.stall.title
    assert re.match(
        r"rank 1 is stuck at train.py:\d+ while rank 0 waits in barrier at train.py:\d+", snapshot.verdict.text
    )
    assert snapshot.stall == msgspec.structs.replace(stood.stall, may_go_on=False, cut_short=stood.stall.may_go_on)
    (cause, *_) = snapshot.findings
    assert (cause.finding.code, cause.finding.severity) == (snapshot.verdict.code, Severity.ERROR)
    assert [view.rank for view in snapshot.ranks if view.culprit] == [1]


def _recorded_with_a_wait(directory: Path, steps_afterwards: int) -> Snapshot:
    (directory / layout.JOB_FILE).write_text('{"version": 1, "kind": "run", "job": {"kind": "run"}}')
    ranks = [SimulatedRank(directory, rank, 2, GONE + rank, S, STARTED_NS) for rank in range(2)]
    for rank in ranks:
        rank.make_steps(STARTED_NS + 40 * S)
        rank.beat(STARTED_NS + 41 * S)
    seen, _ = recorded(directory)
    late = Finding(
        code="DDP404", name="long-wait", trouble="long-wait", severity=Severity.WARNING, ranks=(1,),
        title="rank 0 had waited 30 s for rank 1, busy in `save` at train.py:8, when the job was ended",
        basis=frozenset({"run"}), remedy="",
    )  # fmt: skip
    wait = WaitView(late=1, since_ns=STARTED_NS + 10 * S, text="rank 0 has waited 30 s for rank 1")
    writer = HistoryWriter(directory)
    writer.write(msgspec.structs.replace(seen, state="running", now_ns=STARTED_NS + 41 * S, wait=wait, cause=late))
    writer.close()
    for rank in ranks:
        rank.make_steps(STARTED_NS + (40 + steps_afterwards) * S)
        rank.beat(STARTED_NS + 60 * S)
    return recorded(directory)[0]


def test_a_wait_outlives_the_monitor_as_well_unless_the_ranks_came_further(tmp_path: Path) -> None:
    for name, steps in (("there", 0), ("further", 5)):
        (tmp_path / name).mkdir()
        snapshot = _recorded_with_a_wait(tmp_path / name, steps)
        assert snapshot.state == "ended"
        assert snapshot.verdict.text.startswith("rank 0 had waited 30 s for rank 1") == (not steps)
        assert ("DDP404" in {view.finding.code for view in snapshot.findings}) == (not steps)
