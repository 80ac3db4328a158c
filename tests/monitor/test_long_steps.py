"""A job whose steps take longer than ranks count as at work is asked little, and remembers little, for weeks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddpdoctor.monitor.live_run import LiveRun
from ddpdoctor.monitor.processes.liveness import LivenessSampler
from ddpdoctor.record import layout
from ddpdoctor.record.assembly.assemble import MOST_STACKS, Assembly
from ddpdoctor.record.assembly.live import MOST_HELD, FlightTracks
from ddpdoctor.record.events import Flight
from ddpdoctor.record.model import Job
from ddpdoctor.record.reader import RunPlan
from tests.benchmarks.simulated_ranks import SimulatedRank

S = 1_000_000_000
STARTED_NS = 1_700_000_000 * S
STEP_NS = 3 * S
STEPS = 120


def test_its_ranks_are_asked_a_few_times_and_again_once_a_step_takes_longer_than_usual(tmp_path: Path) -> None:
    ranks = [SimulatedRank(tmp_path, rank, 2, pid, STEP_NS, STARTED_NS) for rank, pid in enumerate((os.getpid(), 1))]
    run = LiveRun(tmp_path, RunPlan())
    asked = []
    try:
        for look in range(4 * STEPS):
            now_ns = STARTED_NS + look * STEP_NS // 4
            for rank in ranks:
                rank.make_steps(now_ns)
                rank.beat(now_ns)
            run.look(now_ns)
            asked.append(_asked(tmp_path))
        assert asked[-1] - asked[STEPS] == 0, "many steps without a pause"
        assert 0 < asked[-1] - asked[0] < 20 * len(ranks)
        run.look(now_ns + 3 * STEP_NS)
        assert _asked(tmp_path) > asked[-1]
    finally:
        run.close()


def _asked(directory: Path) -> int:
    """Numbers of the newest requests to all ranks, added up."""
    rings = [path.read_bytes() for path in directory.glob("steps-*.ring")]
    return sum(int.from_bytes(ring[layout.COMMAND_OFFSET :][:4], "little") for ring in rings)


def test_what_it_says_of_collectives_and_stacks_does_not_grow_for_ever(tmp_path: Path) -> None:
    flights = FlightTracks()
    for dump in range(200):
        rows = tuple((record, 0, record, 0, -1, record, 1) for record in range(500 * dump, 500 * (dump + 1)))
        flights.take(7, Flight(recorder=0, time_ns=dump, continues=True, completed=(), rows=rows))
        assert len(flights.columns(7)["sequence"]) <= MOST_HELD
    assert flights.columns(7)["sequence"][-1] == 200 * 500 - 1
    with (tmp_path / layout.EVENTS_FILE.format(7)).open("w") as file:
        start = {"event": "process", "pid": 7, "parent": 1, "rank": 0, "time_ns": 1, "kind": "start"}
        file.write(json.dumps(start) + "\n")
        for dump in range(2 * MOST_STACKS):
            frames = [["train.py", dump, "main"]]
            stack = {"event": "stack", "thread": "MainThread", "main": True, "frames": frames, "time_ns": dump}
            file.write(json.dumps(stack) + "\n")
    assembly = Assembly(tmp_path)
    assembly.poll()
    stacks = assembly.record(Job(kind="run")).stacks
    assert len(stacks) <= MOST_STACKS and stacks[-1].frames[0].line == 2 * MOST_STACKS - 1


def test_a_rank_that_waits_for_as_long_as_in_every_step_is_not_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [SimulatedRank(tmp_path, rank, 2, pid, STEP_NS, STARTED_NS) for rank, pid in enumerate((os.getpid(), 1))]
    monkeypatch.setattr(LivenessSampler, "look", lambda sampler, rings, threads: frozenset(rings))
    run = LiveRun(tmp_path, RunPlan())
    stuck = []
    try:
        for now_ns in (STARTED_NS + 40 * STEP_NS, STARTED_NS + 41 * STEP_NS + S, STARTED_NS + 43 * STEP_NS + S):
            for rank in ranks:
                rank.make_steps(min(now_ns, STARTED_NS + 41 * STEP_NS))
                rank.beat(now_ns)
            stuck.append([rank.rank for rank in run.look(now_ns).ranks if rank.stuck])
    finally:
        run.close()
    assert stuck == [[], [], [0, 1]]
